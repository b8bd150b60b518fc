"""Where the numbers of a run go. Each tracker's library is imported only when that tracker is chosen."""
