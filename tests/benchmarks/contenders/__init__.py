"""Programs that compute on request, each in the interpreter that its library needs."""
