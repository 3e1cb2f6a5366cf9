"""HTTP routes by subject. Each file has a function that makes its routes for a Site."""
