"""The words of descriptions: atoms, products of them over ranges of variables, one number per rank."""
