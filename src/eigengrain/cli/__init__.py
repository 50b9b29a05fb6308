"""The commands of the command line that belong to no other room."""
