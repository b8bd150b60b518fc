"""Needs a module that is not installed anywhere."""

import not_installed_anywhere  # type: ignore[import-not-found]

Thing = not_installed_anywhere.Thing
