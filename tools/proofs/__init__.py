"""The proofs: what those who change the harness type; users type the tools beside this folder."""
