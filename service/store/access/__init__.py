"""Who may call: API keys and sessions of the page."""
