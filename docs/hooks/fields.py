"""Docstrings list arguments and fields as `name: what it is`, with further lines indented; on the site they become a list."""

import re

import griffe

FIELD = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


class Fields(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text):
    lines, inside = [], False
    for line in text.split("\n"):
        if FIELD.match(line):
            if lines and lines[-1] and not inside:
                lines.append("")
            lines.append(FIELD.sub(lambda match: f"- **{match[1]}**: ", line))
            inside = True
        elif inside and line.startswith("    "):
            lines.append(line[2:])
        else:
            inside = inside and not line
            lines.append(line)
    return "\n".join(lines)
