"""HTTP routes, by what they are about. Each file has a function that makes its routes for a Site."""
