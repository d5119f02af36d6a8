"""What a rank writes down."""
