# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli export fp4`: `hf-mxfp4 quantize` as a command of optimum.

optimum reads every file of its namespace folder optimum/commands/register, and offers no other way in: that is where
the wheel puts this file (`package-dir` in pyproject.toml). It must load fast, since each call of optimum-cli loads it.
"""

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class FP4ExportCommand(BaseOptimumCLICommand):
    """Hands its words to `hf_mxfp4.cli.quantize.as_export`."""

    COMMAND = CommandInfo(name="fp4", help="Quantize to 4-bit floating point (NVFP4, MXFP4) with hf_mxfp4.")

    @staticmethod
    def parse_args(parser) -> None:
        parser.prefix_chars = "\0"  # no word is an option to argparse, not even --help: all are left to ours
        parser.add_argument("words", nargs="*")

    def run(self) -> None:
        from hf_mxfp4.cli.quantize import as_export

        as_export(self.args.words)


REGISTER_COMMANDS = [(FP4ExportCommand, ExportCommand)]
