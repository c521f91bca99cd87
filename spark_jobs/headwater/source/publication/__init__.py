"""Publications: made, checked and changed."""
