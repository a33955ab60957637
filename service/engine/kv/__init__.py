"""Keys and values of a batch whose rows have lengths of their own."""
