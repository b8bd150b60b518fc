"""Advantage estimators, one algorithm a file: scores of samples become advantages of tokens."""
