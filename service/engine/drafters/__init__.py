"""What proposes tokens: a draft model, a head that reads the target's hidden states, prompt look-up."""
