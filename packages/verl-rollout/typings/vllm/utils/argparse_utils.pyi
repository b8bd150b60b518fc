from argparse import Namespace

class FlexibleArgumentParser:
    def parse_args(self, args: list[str]) -> Namespace: ...
