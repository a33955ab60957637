"""What proposes tokens: a draft model, an EAGLE head that reads the target's hidden states, or prompt lookup."""
