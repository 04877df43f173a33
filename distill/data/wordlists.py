"""Words that fill the templates: data only."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]


TARGET_LANGUAGES = _words(
    """
    German, French, Spanish, Italian, Portuguese, Dutch
    """
)
NAMES = _words(
    """
    Anna, Ben, Chloe, David, Elena, Farid, Grace, Hugo, Ines, Jonas, Kofi, Laura, Mei, Noah, Olga, Pedro, Quinn,
    Rosa, Samir, Tara, Uma, Victor, Wendy, Xavier, Yusuf, Zoe, Mark, Lisa, Tom, Sarah, Mr. Brown, Mrs. Lopez, Jack,
    Emily, Carlos, Aisha
    """
)
ITEMS = _words(
    """
    apples, books, pencils, stamps, marbles, tickets, eggs, bottles, flowers, coins, cards, shirts, chairs, bricks,
    cakes, oranges, toys, photos, candles, sandwiches, tomatoes, lamps, keys, shells
    """
)
COUNTRIES = _words(
    """
    France, Japan, Brazil, Kenya, Canada, India, Egypt, Norway, Mexico, Vietnam, Peru, Turkey, Australia, Poland,
    Morocco, Thailand, Ireland, Chile, Greece, Ghana, Iceland, Nepal, Cuba, Finland, Argentina, South Africa,
    Indonesia, Portugal, Ukraine, New Zealand, Germany, China, Russia
    """
)
PLACES = _words(
    """
    Paris, the Sahara, Mount Everest, the Amazon, Venice, Kyoto, the Great Wall, Cairo, New York, Lagos, Machu
    Picchu, the Alps, Sydney, a small village, the Moon, Istanbul, a lighthouse, the Grand Canyon, the Taj Mahal,
    London, an old library, the Baltic Sea, Mars, a train station, Rome, the Pacific Ocean
    """
)
PEOPLE = _words(
    """
    Marie Curie, Isaac Newton, Cleopatra, Leonardo da Vinci, Nelson Mandela, Ada Lovelace, Mahatma Gandhi, Charles
    Darwin, Jane Austen, Ludwig van Beethoven, Abraham Lincoln, Frida Kahlo, Galileo Galilei, Napoleon Bonaparte,
    Rosa Parks, Confucius, Nikola Tesla, Julius Caesar, Alan Turing, Vincent van Gogh, Martin Luther King, Florence
    Nightingale, William Shakespeare, Mozart, Aristotle, Queen Victoria
    """
)
JOBS = _words(
    """
    teacher, nurse, carpenter, pilot, chef, farmer, lawyer, librarian, detective, engineer, fisherman, painter,
    programmer, gardener, journalist, mechanic, doctor, musician, astronaut, baker, judge
    """
)
ANIMALS = _words(
    """
    dolphin, fox, elephant, owl, whale, cat, horse, penguin, bee, snake, wolf, turtle, bear, rabbit, octopus,
    parrot, lion, ant, shark, camel
    """
)
CONCEPTS = _words(
    """
    photosynthesis, gravity, inflation, democracy, natural selection, supply and demand, the water cycle, machine
    learning, quantum mechanics, plate tectonics, the Renaissance, the French Revolution, capitalism, entropy, the
    greenhouse effect, antibiotics, the immune system, black holes, stoicism, utilitarianism, electromagnetism,
    genetics, the industrial revolution, feudalism, the Pythagorean theorem, probability, blockchain, neural
    networks, globalization, the Cold War, impressionism, classical conditioning, osmosis, nuclear fusion, the
    scientific method, game theory, opportunity cost, human rights, calculus, vaccines, the solar system,
    relativity, cell division, ecosystems, existentialism, monetary policy, the periodic table, chemical bonds,
    acids and bases, semiconductors, DNA replication, the Roman Empire
    """
)
TOPICS = _words(
    """
    climate change, remote work, social media, healthy eating, space travel, renewable energy, sleep, artificial
    intelligence, public transport, music, travelling alone, school uniforms, exercise, tourism, friendship,
    electric cars, stress, gardening, online learning, recycling, city life, migration, coffee, reading, winter, the
    ocean, money, video games, volunteering, time management, democracy
    """
)
STYLES = _words(
    """
    funny, serious, short, romantic, dramatic, friendly, formal, sad, cheerful, mysterious
    """
)
AUDIENCES = _words(
    """
    children, beginners, experts, high school students, my grandmother, managers, tourists, parents
    """
)
ALGORITHMS = _words(
    """
    binary search, quicksort, merge sort, breadth-first search, matrix multiplication, the sieve of Eratosthenes,
    depth-first search, string reversal, counting words, computing Fibonacci numbers, removing duplicates, finding
    the shortest path, validating parentheses, rotating an array, computing factorials, bubble sort, inserting into
    a linked list, caching results, parsing a CSV line, finding anagrams, base conversion
    """
)
PROGRAMMING = _words(
    """
    Python, Python, Python, JavaScript, Java, C++, C, Go, Rust, SQL, TypeScript, Bash
    """
)
THINGS = _words(
    """
    telephone, bicycle, microscope, steam engine, light bulb, printing press, refrigerator, telescope, camera,
    radio, computer, washing machine, clock, battery, umbrella, piano, compass, laptop, drone, coffee machine,
    helicopter, thermometer, vacuum cleaner, car, television, backpack
    """
)
