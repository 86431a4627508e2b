"""What a method page is written with: parties, networks, messages, federations."""
