"""vLLM as the verifier: a drafter inside its worker, the door inside its API process, and a mailbox between the two."""
