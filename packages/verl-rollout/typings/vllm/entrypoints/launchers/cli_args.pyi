from argparse import Namespace
from dataclasses import dataclass

from vllm.utils.argparse_utils import FlexibleArgumentParser

@dataclass
class BaseFrontendArgs: ...

def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser: ...
def validate_parsed_serve_args(args: Namespace) -> None: ...
