"""What bases, ranks and targets would be worth, before anything is trained."""
