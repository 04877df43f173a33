"""A narrow workload: orders in free text, to be turned into JSON of one schema.

Owns the prompts. They are made from word lists and a seed, so that any number of different ones can be had. Knows no
server.
"""

from __future__ import annotations

import random

_FIRST = (
    *("Anna", "Boris", "Carla", "Deniz", "Elif", "Farid", "Greta", "Hamid", "Ines", "Jonas", "Kaori", "Luis", "Mara"),
    *("Nikhil", "Olga", "Pedro", "Quinn", "Rosa", "Stefan", "Tamar", "Ulrich", "Vera", "Wanda", "Yusuf", "Zoe"),
)
_LAST = (
    *("Almeida", "Brandt", "Costa", "Dvorak", "Eriksen", "Fontaine", "Gruber", "Haddad", "Ivanova", "Jensen", "Kimura"),
    *("Lindqvist", "Moreau", "Novak", "Okafor", "Petrov", "Quist", "Romano", "Santos", "Tanaka", "Urban", "Varga"),
)
_ITEM = (
    *("desk lamp", "office chair", "water pump", "bicycle helmet", "coffee grinder", "garden hose", "tool box"),
    *("camping stove", "wall clock", "steel shelf", "rain jacket", "paint roller", "extension cord", "door lock"),
    *("kitchen scale", "power drill", "travel mug", "wool blanket", "reading lamp", "folding table"),
)
_CITY = (
    *("Lisbon", "Hamburg", "Krakow", "Lyon", "Oslo", "Porto", "Turin", "Vienna", "Zagreb", "Bergen", "Ghent", "Malmo"),
    *("Nantes", "Odense", "Seville", "Tampere", "Utrecht", "Verona", "Brno", "Graz"),
)
_MONTH = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")
_COLOUR = ("black", "blue", "green", "grey", "red", "silver", "white", "yellow")
_FORMS = (
    "{name} from {city} called on {day} {month} and ordered {count} {colour} {item}s. The price is {price} euros each.",
    "On {day} {month} we received a letter. {name} wants {count} {colour} {item}s at {price} euros, sent to {city}.",
    "Please ship {count} {colour} {item}s to {name} in {city}. Ordered on {day} {month}, {price} euros a piece.",
    "Order of {day} {month}: {count} x {item}, {colour}, {price} euros. Customer: {name}, {city}.",
)
_ASK = (
    "Extract the order as JSON with exactly these keys: customer, city, item, colour, quantity, unit_price, currency, "
    'order_date, status. Set status to "open". Answer with the JSON object only, one key per line.\n\nText: {text}'
)


def prompts(count: int, seed: int) -> list[str]:
    """So many prompts; another seed gives others."""
    rng = random.Random(seed)
    return [_ASK.format(text=_text(rng)) for _ in range(count)]


def _text(rng: random.Random) -> str:
    return rng.choice(_FORMS).format(
        name=f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
        city=rng.choice(_CITY),
        item=rng.choice(_ITEM),
        colour=rng.choice(_COLOUR),
        count=rng.randint(2, 60),
        price=f"{rng.randint(2, 400)}.{rng.randint(0, 99):02d}",
        day=rng.randint(1, 28),
        month=rng.choice(_MONTH),
    )
