"""Measurements on the card, one record a row. A suite is one file in `suites`; its name is the file's."""
