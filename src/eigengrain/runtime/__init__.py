"""What every floor may need of the machine: devices, progress bars, files of records. Importing this imports nothing."""
