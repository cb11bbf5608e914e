"""`python -m penstock`, and the `penstock` command where typer or rich cannot be imported."""

import sys


def main() -> None:
    """Run the command line; without typer, only `env`, which is what helps then."""
    try:
        from penstock.cli import main as run_command_line
    except ImportError as error:
        from penstock import env

        if sys.argv[1:2] == ["env"]:
            raise SystemExit(env.main(sys.argv[2:])) from None
        raise SystemExit(
            f"penstock: the command line cannot start: {error}\n"
            "Run `python -m penstock.env` to see what is wrong with the installation."
        ) from error
    run_command_line()


if __name__ == "__main__":
    main()
