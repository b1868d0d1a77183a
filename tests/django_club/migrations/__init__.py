"""The tables of the club and the schema of pgoutbox."""
