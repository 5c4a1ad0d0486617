"""What a user imports: the client, and the `ratchet` command. HTTP only; imports nothing else of ours."""

from clients.client import AsyncRatchet, Ratchet

__all__ = ["AsyncRatchet", "Ratchet"]
