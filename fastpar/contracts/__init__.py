"""What ops and their references share: types, checks of arguments, formats, and what ranks have to agree on."""
