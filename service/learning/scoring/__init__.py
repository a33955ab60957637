"""How a draft would have done on logged generations, without decoding again."""
