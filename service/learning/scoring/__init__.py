"""How a draft would have performed on logged generations, without decoding again."""
