"""Optional acceleration. The optimizer works without this package, only slower."""
