"""Options under headings in --help and docs/options.md, those that people use most first."""

from collections.abc import Mapping

import click

HEADINGS: Mapping[str, tuple[str, ...]] = {
    "Most used": (
        *("-o", "--data", "--shape", "--image", "--append"),
        *("--inputs", "--on", "--benchmark", "--report", "--verbose", "--no-verify"),
    ),
    "Input": ("--value", "--batch-axis", "--noise-inputs", "--fixed-shapes", "--start"),
    "Net": (
        *("--outputs", "--end", "--last-row", "--raw-head", "--tail", "--ncnn", "--custom", "--no-optimize"),
        *("--only", "--skip", "--limit", "--shape-hints"),
    ),
    "Verification": (
        *("--effort", "--modes", "--rtol", "--atol", "--seed", "--seeds", "--range", "--sizes", "--manifest"),
        "--keep-failed",
    ),
    "fp16 and int8": (
        *("--fp16", "--bf16", "--budget", "--no-masks", "--for"),
        *("--quantized", "--keep", "--all", "--weights", "--like"),
    ),
    "Output": ("--blob-names", "--client", "--split", "--binary", "--json", "--quiet", "--help"),
}


class Grouped(click.Command):
    """A command whose --help has its options under these headings."""

    def under_headings(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the options and their texts by heading, in the order of `HEADINGS`."""
        records = {param.opts[-1]: param.get_help_record(ctx) for param in self.get_params(ctx)}
        shown = {
            heading: [record for flag in flags if (record := records.get(flag))] for heading, flags in HEADINGS.items()
        }
        return {heading: found for heading, found in shown.items() if found}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        for heading, records in self.under_headings(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)
