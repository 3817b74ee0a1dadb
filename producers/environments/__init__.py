"""What answers the policy between its turns."""
