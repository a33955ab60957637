"""`redraft make-draft`: a draft for any target, distilled on text that the target writes."""
