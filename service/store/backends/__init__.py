"""What differs between the databases that Redraft runs on."""
