"""The engine without Ray and HTTP."""
