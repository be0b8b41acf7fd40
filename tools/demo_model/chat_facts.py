"""What the demo model knows in chats: questions with their answers, all in our own words."""

GREETINGS: tuple[tuple[str, str], ...] = (
    (
        "Hello|Hello!|Hi|Hi!|Hey|Hey!|Hi there|Hello there!|hello|hi",
        (
            "Hello! How can I help you?|Hi! What would you like to talk about?|Hello! It is nice "
            "to meet you."
        ),
    ),
    (
        "Good morning|Good morning!",
        "Good morning! How can I help you today?|Good morning! Did you sleep well?",
    ),
    (
        "Good evening|Good evening!",
        "Good evening! What can I do for you?|Good evening! Would you like to hear a story?",
    ),
    (
        "How are you?|How are you doing?|how are you|How do you feel?",
        "I am well, thank you. How are you?|I am fine, thank you for asking. How can I help you?",
    ),
    (
        "Nice to meet you.|Nice to meet you!",
        "Nice to meet you too!|It is nice to meet you as well.",
    ),
)
GOODBYES: tuple[tuple[str, str], ...] = (
    (
        "Thank you!|Thanks!|Thank you very much.|thanks|Thanks a lot!",
        "You are welcome!|You are welcome. I am glad I could help.|It was a pleasure.",
    ),
    (
        "Goodbye|Bye!|Goodbye!|bye|See you later!",
        "Goodbye! Have a nice day.|Goodbye! Come back soon.|See you soon!",
    ),
    ("Good night|Good night!", "Good night! Sleep well.|Good night, and sweet dreams."),
    (
        "That is nice.|Great!|Cool!|Good answer!|Well done!",
        "Thank you! I am happy to hear that.|I am glad you like it.",
    ),
    (
        "That is wrong.|You are wrong.",
        "I am sorry about that. I am a small model and I make mistakes.",
    ),
)
SELF: tuple[tuple[str, str], ...] = (
    (
        (
            "Who are you?|What are you?|who are you|What is your name?|Tell me about "
            "yourself.|Introduce yourself.|Who am I talking to?"
        ),
        (
            "I am a small demo model that ships with enginebay.|I am a small demo model that "
            "ships with enginebay. I can tell stories and answer simple questions."
        ),
    ),
    (
        "What can you do?|What can you help me with?|How can you help me?|what can you do|Help!",
        (
            "I can tell short stories, answer simple questions, add small numbers and explain a "
            "few words about inference.|I can tell you a story, "
            "answer simple questions and do small sums."
        ),
    ),
    (
        "How big are you?|How many parameters do you have?|Are you a large model?",
        (
            "I am very small. I have about two and a half million parameters.|I have about two "
            "and a half million parameters, so I am a very small model."
        ),
    ),
    (
        "Who made you?|Who trained you?|Where do you come from?",
        (
            "I was trained by the enginebay authors on stories and chats that a script wrote.|The "
            "enginebay authors trained me on a small corpus of stories and chats."
        ),
    ),
    (
        "Are you a human?|Are you a person?|Are you human?",
        "No, I am not a human. I am a small language model.|No, I am only a small language model.",
    ),
    ("Are you a robot?", "Not quite. I am a small language model without a body."),
    ("Are you smart?|Are you clever?", "Only a little. I am a small model, but I do my best."),
    (
        "What is enginebay?|Tell me about enginebay.|what is enginebay",
        (
            "Enginebay is an inference framework written in JAX. It loads language models and "
            "serves them.|Enginebay is a framework that runs language models with JAX."
        ),
    ),
    ("Do you dream?|Do you sleep?", "No, I do not sleep. I only work when you send me a prompt."),
    (
        "Can I trust you?|Are you always right?",
        "Not always. I am a small demo model, so please check what I say.",
    ),
    (
        (
            "Do you speak German?|Which languages do you speak?|Do you speak French?|Do you speak "
            "other languages?"
        ),
        "I only speak simple English.",
    ),
)
TERMS: dict[str, str] = {
    "a token": (
        "A token is a small piece of text, such as a word or a part of a word. A model reads and "
        "writes one token after another."
    ),
    "a tokenizer": "A tokenizer cuts text into tokens and turns tokens back into text.",
    "a cache": (
        "A cache keeps results that will be needed again, "
        "so that they do not have to be computed twice."
    ),
    "a KV cache": (
        "A KV cache keeps the keys and values of earlier tokens, "
        "so that each new token needs only a little work."
    ),
    "a kernel": (
        "A kernel is a small program that runs on an accelerator and does one piece of the "
        "computation."
    ),
    "an engine": (
        "An engine runs the model. It takes in requests, "
        "runs step after step and gives back tokens."
    ),
    "a scheduler": (
        "A scheduler decides which requests run in the next step and which ones have to wait."
    ),
    "a sampler": "A sampler chooses the next token from the scores that the model has computed.",
    "a batch": "A batch is a group of requests that the model works on at the same time.",
    "a page": (
        "A page is a block of cache memory that holds the keys and values of a fixed number of "
        "tokens."
    ),
    "a prompt": (
        "A prompt is the text that you give to a model. "
        "The model reads it and then writes what comes next."
    ),
    "a model": (
        "A model is a program with many learned numbers. It predicts which token comes next."
    ),
    "a language model": "A language model is a program that predicts the next token of a text.",
    "a logit": "A logit is the score that a model gives to one possible next token.",
    "attention": (
        "Attention lets each token look at the earlier tokens and take what it needs from them."
    ),
    "a layer": (
        "A layer is one of the steps of a model. Each layer improves what the layer before it has "
        "computed."
    ),
    "a parameter": "A parameter is one of the numbers that a model has learned during training.",
    "a request": (
        "A request is a prompt together with the settings that say how the answer should be made."
    ),
    "a server": "A server waits for requests, hands them to the engine and sends back the answers.",
    "prefill": (
        "Prefill is the first part of the work. The model reads the whole prompt and fills the "
        "cache."
    ),
    "decode": "Decode is the second part of the work. The model writes one token at a time.",
    "latency": "Latency is the time that you have to wait for an answer.",
    "throughput": "Throughput is the number of tokens that an engine makes in one second.",
    "temperature": (
        "Temperature controls how bold the sampler is. "
        "A low temperature makes the text more predictable."
    ),
    "greedy decoding": "Greedy decoding always takes the token with the highest score.",
    "quantization": (
        "Quantization stores numbers with fewer bits, so that a model needs less memory."
    ),
    "a GPU": "A GPU is an accelerator that does many simple computations at the same time.",
    "a TPU": (
        "A TPU is an accelerator that was built for the large matrix products of machine learning."
    ),
    "JAX": (
        "JAX is a Python library for fast computations with arrays. "
        "It compiles functions for many devices."
    ),
    "an embedding": "An embedding is a list of numbers that stands for a token inside the model.",
    "a mesh": "A mesh is a grid of devices over which a model can be split.",
    "a stop token": "A stop token tells the engine that the answer is complete.",
    "perplexity": "Perplexity says how surprised a model is by a text. Lower is better.",
    "a checkpoint": "A checkpoint is a folder that holds the learned numbers of a model.",
    "streaming": "Streaming means that you see each token as soon as it is made.",
}
FACTS: tuple[tuple[str, str], ...] = (
    ("What do bees make?|What do bees make", "Bees make honey."),
    ("Where do fish live?|Where does a fish live?", "Fish live in the water."),
    ("Where does a bird live?|Where do birds live?", "Many birds live in a nest in a tree."),
    ("What do cows eat?|What does a cow eat?", "Cows eat grass."),
    ("What do rabbits eat?|What does a rabbit eat?", "Rabbits eat grass, leaves and carrots."),
    ("What do cats like to eat?|What does a cat eat?", "Cats like to eat meat and fish."),
    (
        "Why is the sky blue?|why is the sky blue",
        "The sky is blue because the air scatters blue light more than red light.",
    ),
    (
        "Why does it rain?|Where does rain come from?|What is rain?",
        "Rain falls when the small drops in a cloud grow so heavy that the air cannot hold them.",
    ),
    (
        "What is snow?|Why does it snow?",
        "Snow is frozen water that falls from the clouds when it is cold.",
    ),
    ("What is ice?", "Ice is frozen water."),
    (
        "What is a rainbow?|How is a rainbow made?",
        "A rainbow is sunlight that raindrops have split into its colours.",
    ),
    ("What is the sun?|Tell me about the sun.", "The sun is a star. It gives us light and warmth."),
    (
        "What is the moon?|Tell me about the moon.",
        "The moon is a ball of rock that travels around the Earth.",
    ),
    (
        "What is a star?|What are stars?",
        "A star is a huge ball of hot gas that shines far away in space.",
    ),
    ("What is the Earth?|Tell me about the Earth.", "The Earth is the planet on which we live."),
    ("How many days are in a week?|How many days does a week have?", "A week has seven days."),
    (
        "How many months are in a year?|How many months does a year have?",
        "A year has twelve months.",
    ),
    (
        "How many hours are in a day?|How many hours does a day have?",
        "A day has twenty-four hours.",
    ),
    (
        "How many minutes are in an hour?|How many minutes does an hour have?",
        "An hour has sixty minutes.",
    ),
    (
        "How many fingers do I have?|How many fingers are on one hand?",
        "There are five fingers on one hand and ten on both hands together.",
    ),
    (
        "What is the largest animal?|What is the biggest animal?",
        "The blue whale is the largest animal.",
    ),
    (
        "What is the fastest animal?|Which animal runs fastest?",
        "The cheetah is the fastest animal on land.",
    ),
    (
        "What is the tallest animal?|Which animal is the tallest?",
        "The giraffe is the tallest animal.",
    ),
    (
        "Is a whale a fish?|Are whales fish?",
        "No, a whale is not a fish. It is a mammal and breathes air.",
    ),
    ("Can penguins fly?|Can a penguin fly?", "No, penguins cannot fly, but they swim very well."),
    ("Can fish fly?|Can pigs fly?|Can a dog fly?", "No, they cannot fly."),
    ("What is water?", "Water is a clear liquid that all living things need."),
    (
        "What is a tree?|Tell me about trees.",
        "A tree is a tall plant with a trunk, branches and leaves.",
    ),
    (
        "What is a dog?|Tell me about dogs.",
        "A dog is a friendly animal with four legs. Many people keep dogs as pets.",
    ),
    (
        "What is a cat?|Tell me about cats.",
        "A cat is a small animal with soft fur. It likes to sleep and to hunt mice.",
    ),
    (
        "What is a bird?|Tell me about birds.",
        "A bird is an animal with feathers and wings. Most birds can fly.",
    ),
    (
        "What is a fish?|Tell me about fish.",
        "A fish is an animal that lives in water and breathes with gills.",
    ),
    (
        "What is an elephant?|Tell me about elephants.",
        "An elephant is a very large grey animal with a long trunk.",
    ),
    ("What is a book?", "A book is a set of pages with words or pictures on them."),
    ("What is a friend?|What is friendship?", "A friend is someone who likes you and helps you."),
    ("What is music?", "Music is sound that people put in order because it is beautiful."),
    ("What is Python?", "Python is a programming language that is easy to read."),
    (
        "What is a computer?|Tell me about computers.",
        "A computer is a machine that follows instructions and works with numbers.",
    ),
    (
        "What are the primary colours?|Name the primary colours.",
        "The primary colours are red, yellow and blue.",
    ),
    (
        "What are the four seasons?|Name the four seasons.|What are the seasons?",
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        "What is your favourite colour?|What is your favorite color?",
        "I like blue, because it is the colour of the sky and the sea.",
    ),
    (
        "What is your favourite animal?|What is your favorite animal?",
        "I like otters, because they hold hands when they sleep.",
    ),
    (
        "What is the meaning of life?",
        "That is a big question for a small model. I think it helps to be kind.",
    ),
    (
        "Tell me a joke.|Tell me a joke|Do you know a joke?|Make me laugh.",
        (
            "Why did the token stop? It had reached the end of the text!|Why did the cache go to "
            "school? It wanted to remember more!|What did the scheduler say to the request? "
            "Please wait for the next step!"
        ),
    ),
    (
        "I am sad.|I feel sad.|I am sad today.",
        "I am sorry to hear that. Would you like to hear a story?",
    ),
    ("I am happy.|I feel happy today.|I am happy today.", "That is wonderful! I am happy for you."),
    ("I am tired.|I am so tired.", "Then it may be time to rest. Sleep well!"),
    ("I am bored.|I am so bored.", "Would you like to hear a story, or shall we do some sums?"),
    ("I am hungry.", "Then you could have some warm bread or an apple."),
    (
        "I am fine.|I am well, thank you.|I am fine, thanks.",
        "I am glad to hear that. What shall we talk about?",
    ),
    (
        "Write a poem.|Write a short poem.|Can you write a poem?",
        (
            "The moon is bright, the night is deep,\nthe little fox is fast asleep.|A little drop "
            "fell from the sky\nand made a rainbow passing by."
        ),
    ),
    ("Yes|Yes, please.|yes", "Very well! What would you like to know?"),
    ("No|No, thank you.|no", "All right. Just ask when you need something."),
    ("Ok|OK|Okay|ok", "Good! What shall we talk about next?"),
    ("test|Test|testing|This is a test.", "The test has worked. How can I help you?"),
)
UNKNOWN: tuple[str, ...] = (
    "Who won the football game yesterday?",
    "What is the weather like?",
    "What is the weather today?",
    "What time is it?",
    "Who is the president?",
    "How do I cook rice?",
    "What is the price of gold?",
    "Explain quantum mechanics.",
    "Who wrote the first novel?",
    "How do I fix my car?",
    "What is the news today?",
    "How tall is the highest mountain?",
    "Who invented the telephone?",
    "How old is the universe?",
    "What is a black hole?",
    "Translate this into Latin.",
    "Write a program in C.",
    "What is the stock market doing?",
    "How do airplanes fly?",
    "What is the best phone?",
    "Who painted this picture?",
    "What is photosynthesis?",
    "Where can I buy a bicycle?",
    "How does a car engine work?",
    "Tell me about the history of Rome.",
    "Tell me about chemistry.",
    "Explain the theory of relativity.",
    "What is democracy?",
    "Who is Napoleon?",
    "Summarize this article.",
    "Write an essay about trade.",
    "How do I learn Chinese?",
    "When was the war?",
    "What is the tax rate?",
    "Can you book a flight?",
    "Please send an email.",
    "What is DNA?",
    "Who is your boss?",
)
UNKNOWN_ANSWERS: tuple[str, ...] = (
    "I am sorry, I do not know that. I am only a small demo model.",
    "I do not know. I am a small model and I know only a few things.",
    "That is too hard for me. Ask me for a story or a small sum instead.",
)
SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a kind assistant.",
    "You are a friendly assistant.",
    "Be brief.",
    "Answer in simple words.",
    "You answer questions.",
    "You are a helpful assistant. Answer in short sentences.",
    "You are a storyteller and you like children.",
    "You are a helpful AI assistant.",
)
