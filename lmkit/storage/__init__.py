"""Write files that are whole or absent, hash them, and lock them."""
