"""`python -m lightning_moe_ep` is the `lightning-moe-ep` command."""

from lightning_moe_ep.cli.main import main

if __name__ == "__main__":
    main()
