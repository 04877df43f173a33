"""Templates and words for `prompts`: data only. Placeholders are those of `prompts._fill` and of each maker."""

from __future__ import annotations

TARGET_LANGUAGES = ["German", "French", "Spanish", "Italian", "Portuguese", "Dutch"]
TRANSLATE = [
    "Translate this {source} sentence into {into}: {text}",
    "Translate {source} to {into}: {text}",
    "Please translate the following text from {source} to {into}.\n\n{text}",
    "{text}\n\nTranslate the above into {into}.",
    "How would you say this in {into}? \"{text}\"",
    "What does this {source} text mean in {into}? {text}",
    "Give me the {into} translation of: {text}",
    "I received this message in {source}. Can you put it into {into} for me?\n{text}",
]
SUMMARIZE = [
    "Summarize: {text}",
    "Summarize the following text in two sentences.\n\n{text}",
    "Give a short summary of this passage:\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "{text}\n\nTL;DR:",
    "Write a brief summary of the article below.\n{text}",
    "Condense this into one paragraph:\n\n{text}",
    "Read the text and list its three key ideas.\n\n{text}",
    "Please summarise the text for a newsletter: {text}",
]
READING = [
    "{text}\n\nQuestion: {question}",
    "Answer the question using only the text.\n\nText: {text}\n\nQuestion: {question}\nAnswer:",
    "Read these documents and answer.\n\n{text}\n\n{question}",
    "Context:\n{text}\n\nBased on the context, {question}",
    "{question} Use the following information.\n\n{text}",
    "Here is some background:\n\n{text}\n\nNow tell me: {question}",
]
READING_QUESTIONS = [
    "what does the text say about \"{subject}\"?",
    "Why does it matter that \"{subject}\"?",
    "What happens after \"{subject}\"?",
    "Which details does the text give about \"{subject}\"?",
    "What is the main topic of the first passage?",
    "Who or what is described here, and what do they do?",
    "When would someone need this?",
    "What can be concluded from \"{subject}\"?",
    "What are the conditions or limits mentioned?",
    "How is \"{subject}\" explained?",
]
QUESTIONS = [
    "What is the capital of {country}?", "Who was {person}?", "When did {person} live?", "Where is {place} located?",
    "What is {concept}?", "Who discovered {concept}?", "When was the {thing} invented?", "Who invented the {thing}?",
    "How does a {thing} work?", "What language is spoken in {country}?", "What is the currency of {country}?",
    "How many people live in {country}?", "What do {animal}s eat?", "How long does a {animal} live?",
    "Where do {animal}s live?", "What is the largest city in {country}?", "Which countries border {country}?",
    "What is {place} known for?", "Why is {person} famous?", "What is the difference between {concept} and {concept2}?",
    "What happened in {country} in {year}?", "Who was the leader of {country} in {year}?", "what does a {job} do",
    "when was {place} built", "who wrote about {concept} first", "name three facts about {animal}s",
    "What is the national dish of {country}?", "How far is {place} from the sea?", "what is {topic} about",
    "How old is the universe?", "Which {thing} was the first to be sold widely?", "List five {item} producers.",
    "Is {concept} related to {concept2}?", "where did {person} go to school", "what year did {person} die",
    "How much does a {thing} cost?", "What is the population of {place}?", "who plays the lead in a film about {person}",
]
WORD_PROBLEMS = [
    "{name} has {b} {item} and gives {a} of them to {other}. Then {name} buys {c} packs with {e} {item} each. How many {item} does {name} have now?",
    "A shop sells {item} for ${c} each. {name} buys {a} of them and pays with a ${d} note. How much change does {name} get?",
    "{name} reads {b} pages a day. A book has {d} pages. How many full days are needed, and how many pages are left for the last day?",
    "{name} earns ${b} an hour and works {c} hours a day, {a} days. {p}% goes to tax. How much is left?",
    "There are {d} {item} in a warehouse. {p}% are sold on Monday and {b} more on Tuesday. How many remain?",
    "{name} is {a} years older than {other}. Together they are {b} years old. How old is each of them?",
    "A train travels {d} kilometres in {c} hours. At the same speed, how far does it go in {a} hours?",
    "{name} plants {c} rows of {a} {item}. {other} plants twice as many rows with {e} in each. How many {item} are planted in total?",
    "A recipe for {c} people needs {b} grams of flour. How many grams are needed for {e} people?",
    "{name} saves ${b} each week. After {a} weeks, ${d} is spent on a bicycle. How much money is left or missing?",
    "{name}, {other} and {third} share {d} {item}. {name} gets twice as many as {other}, and {third} gets {a}. How many does {name} get?",
    "A tank holds {d} litres. It loses {c} litres every hour and gains {a} litres every hour from a tap. How much is in it after {e} hours if it starts full?",
    "A jacket costs ${d}. It is reduced by {p}% and then {name} uses a coupon for ${a}. What is the final price?",
    "{name} runs {c} miles on Monday, twice as far on Tuesday and {a} miles on Wednesday. What is the average distance per day?",
    "Each box holds {e} {item}. {name} fills {b} boxes and has {a} {item} left over. How many {item} were there?",
    "{name} types {b} words per minute. How long does an essay of {d} words take? Round to the nearest minute.",
    "A class has {b} students. {a} of them walk to school and half of the others take the bus. How many take the bus?",
    "{name} bought {a} {item} at ${c} each and {e} {item2} at ${a} each. How much did everything cost?",
    "A farmer has {b} chickens and {a} cows. How many legs do the animals have altogether?",
    "{name} drinks {c} glasses of water a day, {other} drinks {a} more. How many glasses do they drink together in {e} days?",
    "The sum of three consecutive numbers is {d}. If the smallest is increased by {a}, what is the new sum?",
    "It takes {name} {b} minutes to paint a fence and {other} {e} minutes more. How long do both take for {c} fences each?",
    "{name} had ${d}. A third was spent on {item} and ${b} on {item2}. How much money remains?",
    "A bus has {b} passengers. At each of {c} stops {a} get off and {e} get on. How many passengers are on the bus at the end?",
    "{name} bakes {a} trays of {e} cookies. {p}% are burnt. The rest are sold for ${c} each. How much money does {name} make?",
    "Tickets cost ${a} for children and ${b} for adults. A family of {c} adults and {e} children visits. What do they pay?",
]
MATH = [
    "Solve for x: {a}x + {b} = {d}.", "What is {d} divided by {c}, and what is the remainder?",
    "Simplify the expression ({a}x + {c})(x - {e}).", "Find the derivative of f(x) = {a}x^{c} + {b}x.",
    "What is the area of a circle with radius {a}?", "A triangle has sides {a}, {e} and {b}. Can it exist? Explain.",
    "Two dice are rolled. What is the probability that the sum is {a}?", "What is the greatest common divisor of {d} and {b}?",
    "Find all prime numbers between {b} and {d}.", "Compute {a} * {b} + {d} / {c}.", "Is {d} a multiple of {c}?",
    "A bag has {a} red, {c} blue and {e} green balls. Two are drawn. What is the probability that both are red?",
    "Solve the system: x + y = {b}, x - y = {c}.", "Write {d} in binary.", "What is {p}% of {d}?",
    "The function f satisfies f(x) = {a}x - {c}. Find f(f({e})).", "Find the {e}th term of the sequence {a}, {b}, ...",
    "Convert {b} degrees Celsius to Fahrenheit.", "What is the volume of a box of {a} by {c} by {e}?",
    "Factor x^2 + {b}x + {d} if possible.", "Find the mean and the median of {a}, {b}, {c}, {d}, {e}.",
]
CODE_TASKS = [
    "Write a {language} function that performs {algorithm}.", "Implement {algorithm} in {language} and explain how it works.",
    "Write a {language} program that reads {item} from a file and counts them.", "What is the time complexity of {algorithm}?",
    "Write unit tests in Python for a function that performs {algorithm}.", "Create a {language} class for a {thing}.",
    "Write a SQL query that finds the {a} {job}s with the most {item}.", "Write a regular expression that matches a date.",
    "Write a {language} function that takes a list of {item} and returns the {a} largest.", "Explain recursion with an example in {language}.",
    "How do I sort a list of {item} by name in {language}?", "Write an HTML page with a form for {item}.",
    "Write a {language} function to check whether a string is a palindrome.", "How do I read a JSON file in {language}?",
    "Design a small command line tool in Python that keeps track of {item}.", "Compare {algorithm} with {concept}.",
]
CODE_OVER_SOURCE = [
    "Write a Python function.\n\n{signature}\n    \"\"\"{doc}\"\"\"",
    "What does this function do?\n\n```python\n{code}\n```",
    "Explain the following code step by step.\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n{code}",
    "Complete this function:\n```python\n{signature}\n    \"\"\"{doc}\"\"\"\n```",
    "Write a test for `{name}`, which does the following: {doc}",
    "Is there a bug in this function? How could it be improved?\n\n{code}",
    "Translate this Python function to JavaScript.\n\n{code}",
    "Implement {name} in Python. {doc}",
]
EXTRACT_FROM_TEXT = [
    "List all nouns in the following text as a JSON array.\n\n{text}", "Extract the key terms from the text:\n{text}",
    "Find every name, number and date in this text and return them as JSON.\n\n{text}",
    "Which verbs are used in this paragraph? Give a bulleted list.\n\n{text}",
    "Make a table with two columns, term and meaning, from this text.\n\n{text}",
    "Extract the instructions as a numbered list: {text}", "Classify the topic of this text and give three tags.\n\n{text}",
    "Is the tone of this text positive, negative or neutral? Explain.\n\n{text}",
]
RECORDS = [
    "{name} ordered {a} {item} on March {c} for ${d}.", "{name} lives in {country} and works as a {job}.",
    "The {thing} was sold to {other} for ${d} in {year}.", "In {year}, {name} moved from {place} to {country}.",
    "{name} rated the {item} {c} out of 10 and the {item2} {a} out of 12.", "{other}, a {job}, is {b} years old.",
    "The company of {name} had {d} employees and sold {item} in {country}.",
]
EXTRACT_RECORDS = [
    "Extract the people and what is said about each as JSON.\n\n{text}", "{text}\n\nPut this information into a table.",
    "Return a JSON object with the fields name, number and place for every sentence.\n{text}",
    "From the text, list all names: {text}", "{text} Which amount is the highest? Answer with the amount only.",
    "Identify the people, places and numbers in the text.\n\n{text}", "Convert to CSV: {text}",
]
REWRITE = [
    "Rewrite this text in simple words.\n\n{text}", "Make this more formal: {text}", "Correct the grammar: {text}",
    "Rewrite the paragraph below as a friendly e-mail.\n\n{text}", "Turn this into bullet points:\n{text}",
    "Continue this text:\n\n{text}", "Rephrase: {text}", "Explain this to a {{}} child:\n{text}".replace("{{}} ", "ten-year-old "),
]
WRITING = [
    "Write a short story about a {job} and a {animal} in {place}.", "Write an e-mail to a {job} about {item}.",
    "Write a {style} poem about {topic}.", "Write a blog post about {topic} for {audience}.",
    "Draft a letter of complaint about a broken {thing}.", "Write a product description for a new {thing}.",
    "Write the opening paragraph of a novel set in {place} in {year}.", "Give me ten titles for an article on {topic}.",
    "Write a persuasive essay on {topic}.", "Write a {style} review of a restaurant in {country}.",
    "Outline a presentation on {concept} for {audience}.", "Write a travel plan for {a} days in {country}.",
    "Write a speech for {name}, who retires after {b} years as a {job}.", "Describe {place} at sunrise.",
    "Write a cover letter for a position as a {job}.", "Write a dialogue between a {job} and a {animal}.",
    "Write a recipe with {item} and {item2}.", "Write a social media post announcing {topic}.",
]
ROLEPLAY = [
    "You are a {job}. Explain to {audience} why {topic} matters.", "Pretend to be {person} and answer: what do you think about {topic}?",
    "Act as a {style} {job} and describe your day.", "Imagine you are a {animal} living in {place}. Tell me about your life.",
    "Play the role of a customer who wants to return a {thing}. I am the shop assistant.", "Be my teacher and introduce me to {concept}.",
    "Speak like a pirate and explain {concept}.", "You are interviewing {person}. Ask five questions and give their answers.",
    "As a doctor, explain what {topic} does to the body.", "You are a tour guide in {place}. Welcome your visitors.",
    "Pretend you are a {thing} that can talk. What would you complain about?", "Act as a coach for {audience} who struggle with {topic}.",
    "Write as if you were a historian in the year 2200 looking back at {topic}.", "You are a robot from {place}. Introduce yourself.",
]
REASONING = [
    "{name} is taller than {other}, and {other} is taller than {third}. Who is the shortest?", "{name} finished the race right before {other}. {other} was third. Which place did {name} take?",
    "{name} is the sister of {other}'s father. How is {name} related to {other}?", "If all {item} are {item2} and some {item2} are red, must some {item} be red?",
    "What comes next: {a}, {b}, {a}, {b}, ...?", "Which of these does not belong: {item}, {item2}, {animal}, {thing}? Why?",
    "If it takes {a} {job}s {a} hours to make {a} {item}, how long do {b} {job}s need for {b} {item}?", "Why might a {job} carry a {thing}?",
    "{name} faces north, turns right twice and then left. Which direction is {name} facing?", "What would happen if there were no {item}?",
    "Name one argument for and one against {topic}.", "{name} put the {item} in a box and left. {other} moved them to a bag. Where will {name} look first?",
    "Three boxes are labelled {item}, {item2} and mixed, all wrongly. How many draws are needed to label them correctly?", "Is a {thing} heavier than a {animal}? Explain your reasoning.",
    "Yesterday was two days after Monday. What day is tomorrow?", "A {animal} is hidden behind one of {a} doors. How would you find it with the fewest tries?",
]
EXPLAIN = [
    "Explain {concept} to {audience}.", "What are the causes and effects of {topic}?", "How is {concept} used in practice?",
    "Compare {concept} and {concept2}.", "Describe the history of {topic}.", "What role did {person} play in history?",
    "What are the advantages and disadvantages of {topic}?", "Give an overview of {concept} with an example.",
    "How has {topic} changed since {year}?", "Why is {concept} important?", "Which methods are used to study {concept}?",
    "What are common misunderstandings about {concept}?", "How does {concept} affect {animal}s?", "Discuss the ethics of {topic}.",
    "Explain how a {thing} works and which principle it uses.", "What is the relation between {topic} and {concept}?",
    "Describe the geography and economy of {country}.", "Give me a lesson plan on {concept} for {audience}.",
]
FOLLOW_UPS = [
    "Can you give an example?", "Explain that in more detail.", "Make it shorter.", "Why?", "Rewrite your answer as a list.",
    "Now say it in simpler words.", "What else should I know?", "Are you sure? Check your answer.", "How would you improve it?",
    "Add a second part.", "What are the limitations?", "Translate your answer into French.",
]
NAMES = [
    "Anna", "Ben", "Chloe", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Laura", "Mei", "Noah",
    "Olga", "Pedro", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Victor", "Wendy", "Xavier", "Yusuf", "Zoe", "Mark", "Lisa",
    "Tom", "Sarah", "Mr. Brown", "Mrs. Lopez", "Jack", "Emily", "Carlos", "Aisha",
]
ITEMS = [
    "apples", "books", "pencils", "stamps", "marbles", "tickets", "eggs", "bottles", "flowers", "coins", "cards", "shirts",
    "chairs", "bricks", "cakes", "oranges", "toys", "photos", "candles", "sandwiches", "tomatoes", "lamps", "keys", "shells",
]
COUNTRIES = [
    "France", "Japan", "Brazil", "Kenya", "Canada", "India", "Egypt", "Norway", "Mexico", "Vietnam", "Peru", "Turkey",
    "Australia", "Poland", "Morocco", "Thailand", "Ireland", "Chile", "Greece", "Ghana", "Iceland", "Nepal", "Cuba",
    "Finland", "Argentina", "South Africa", "Indonesia", "Portugal", "Ukraine", "New Zealand", "Germany", "China", "Russia",
]
PLACES = [
    "Paris", "the Sahara", "Mount Everest", "the Amazon", "Venice", "Kyoto", "the Great Wall", "Cairo", "New York", "Lagos",
    "Machu Picchu", "the Alps", "Sydney", "a small village", "the Moon", "Istanbul", "a lighthouse", "the Grand Canyon",
    "the Taj Mahal", "London", "an old library", "the Baltic Sea", "Mars", "a train station", "Rome", "the Pacific Ocean",
]
PEOPLE = [
    "Marie Curie", "Isaac Newton", "Cleopatra", "Leonardo da Vinci", "Nelson Mandela", "Ada Lovelace", "Mahatma Gandhi",
    "Charles Darwin", "Jane Austen", "Ludwig van Beethoven", "Abraham Lincoln", "Frida Kahlo", "Galileo Galilei",
    "Napoleon Bonaparte", "Rosa Parks", "Confucius", "Nikola Tesla", "Julius Caesar", "Alan Turing", "Vincent van Gogh",
    "Martin Luther King", "Florence Nightingale", "William Shakespeare", "Mozart", "Aristotle", "Queen Victoria",
]
JOBS = [
    "teacher", "nurse", "carpenter", "pilot", "chef", "farmer", "lawyer", "librarian", "detective", "engineer", "fisherman",
    "painter", "programmer", "gardener", "journalist", "mechanic", "doctor", "musician", "astronaut", "baker", "judge",
]
ANIMALS = [
    "dolphin", "fox", "elephant", "owl", "whale", "cat", "horse", "penguin", "bee", "snake", "wolf", "turtle", "bear",
    "rabbit", "octopus", "parrot", "lion", "ant", "shark", "camel",
]
CONCEPTS = [
    "photosynthesis", "gravity", "inflation", "democracy", "natural selection", "supply and demand", "the water cycle",
    "machine learning", "quantum mechanics", "plate tectonics", "the Renaissance", "the French Revolution", "capitalism",
    "entropy", "the greenhouse effect", "antibiotics", "the immune system", "black holes", "stoicism", "utilitarianism",
    "electromagnetism", "genetics", "the industrial revolution", "feudalism", "the Pythagorean theorem", "probability",
    "blockchain", "neural networks", "globalization", "the Cold War", "impressionism", "classical conditioning",
    "osmosis", "nuclear fusion", "the scientific method", "game theory", "opportunity cost", "human rights", "calculus",
    "vaccines", "the solar system", "relativity", "cell division", "ecosystems", "existentialism", "monetary policy",
    "the periodic table", "chemical bonds", "acids and bases", "semiconductors", "DNA replication", "the Roman Empire",
]
TOPICS = [
    "climate change", "remote work", "social media", "healthy eating", "space travel", "renewable energy", "sleep",
    "artificial intelligence", "public transport", "music", "travelling alone", "school uniforms", "exercise", "tourism",
    "friendship", "electric cars", "stress", "gardening", "online learning", "recycling", "city life", "migration",
    "coffee", "reading", "winter", "the ocean", "money", "video games", "volunteering", "time management", "democracy",
]
STYLES = ["funny", "serious", "short", "romantic", "dramatic", "friendly", "formal", "sad", "cheerful", "mysterious"]
AUDIENCES = ["children", "beginners", "experts", "high school students", "my grandmother", "managers", "tourists", "parents"]
ALGORITHMS = [
    "binary search", "quicksort", "merge sort", "breadth-first search", "matrix multiplication", "the sieve of Eratosthenes",
    "depth-first search", "string reversal", "counting words", "computing Fibonacci numbers", "removing duplicates",
    "finding the shortest path", "validating parentheses", "rotating an array", "computing factorials", "bubble sort",
    "inserting into a linked list", "caching results", "parsing a CSV line", "finding anagrams", "base conversion",
]
PROGRAMMING = ["Python", "Python", "Python", "JavaScript", "Java", "C++", "C", "Go", "Rust", "SQL", "TypeScript", "Bash"]
THINGS = [
    "telephone", "bicycle", "microscope", "steam engine", "light bulb", "printing press", "refrigerator", "telescope",
    "camera", "radio", "computer", "washing machine", "clock", "battery", "umbrella", "piano", "compass", "laptop", "drone",
    "coffee machine", "helicopter", "thermometer", "vacuum cleaner", "car", "television", "backpack",
]
