"""Reports for people and for machines: text, pictures, HTML, and projections of the JSON. Nothing here needs torch."""
