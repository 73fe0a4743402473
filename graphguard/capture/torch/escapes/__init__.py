"""What programs do past the dispatcher, where the recorder would not see it: told, or refused."""
