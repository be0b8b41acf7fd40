"""The plot shapes of the demo corpus, in a small template language that stories.py renders.

A plot is a tuple of beats, told in order. Full alternatives of a beat are separated by " | ",
alternatives inside a sentence stand in [square/brackets], {braces} are slots, and a beat that opens
with "?" may be left out.
"""

OPENINGS: tuple[str, ...] = (
    "Once upon a time, there was {intro}. {He} lived {home}.",
    "Once upon a time, there was {intro} who lived {home}.",
    "Once upon a time, {intro} lived {home}.",
    "Once upon a time, in a land far away, there lived {intro}.",
    "Once there was {intro}. {He} lived {home} with {his} family.",
    "There was once {intro} who lived {home}.",
    "Long ago, {intro} lived {home}.",
    "{Intro} lived {home}.",
)

LINKS: tuple[str, ...] = (
    "The next day, {hero} woke up early and was ready for something new.",
    "A few days later, the sun was shining and {hero} went out again.",
    "When the week was over, {hero} had another adventure.",
    "One month later, something else happened.",
    "But that was not the end of the story.",
    "On the following morning, {hero} could not wait to go outside.",
)

CLOSINGS: tuple[str, ...] = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "That night, {hero} fell asleep with a smile.",
    "{hero} never forgot that day.",
    "And they all lived happily ever after.",
    "{hero} went home happy, and dinner was waiting on the table.",
    "When the stars came out, {hero} was still smiling.",
    "It had been a very good day.",
    "And whenever it rained, {hero} told the story again.",
)

PLOTS: dict[str, tuple[str, ...]] = {
    "lost": (
        (
            "{He} had {a_thing} that {he} loved more than anything. | "
            "{His} favourite thing in the world was {a_thing}."
        ),
        (
            "One [morning/day/afternoon], {hero} played {at_place}. When {he} came home, "
            "the {thing} was gone."
        ),
        (
            '?"Oh no!" cried {hero}. "Where can it be?" | {hero} felt [very sad/so sad that {he} '
            "could not eat]."
        ),
        (
            "{hero} looked {inspot}, but it was not there. Then {he} looked {spot2}, but there "
            "was only [dust/an old shoe/a sleepy cat]."
        ),
        (
            '{friend} {fkind_clause}came along and asked, "Why are you so sad?" "I have lost my '
            '{thing}," said {hero}. "I will help you look," said {friend}.'
        ),
        "Together they went back to {place} and searched everywhere.",
        (
            'At last {friend} looked {spot3}. "Here it is!" {fhe} shouted. | '
            "Suddenly {friend} saw something {colour} {spot3}. It was the {thing}!"
        ),
        '"Thank you, {friend}!" said {hero}, and hugged {fhim} tightly.',
        "?After that, {hero} always put the {thing} in a safe place.",
    ),
    "gift": (
        "{His} best friend was {friend} {fkind_apart}",
        (
            "[Tomorrow/Soon] it would be {friend}'s birthday, "
            "and {hero} wanted to make {food} for {fhim}."
        ),
        (
            "{He} looked in the kitchen, but there was no [flour/butter/sugar/milk] left. | "
            "{He} opened the cupboard, but it was almost empty."
        ),
        (
            'So {hero} went to {elder}. "May I have a little, please?" {he} asked. "Of course," '
            'said {elder}, "if you help me [sweep the floor/carry the wood/water the plants] '
            'first."'
        ),
        "{hero} worked hard until everything was done, and {elder} filled {his} basket to the top.",
        "?On the way home {he} nearly dropped it, but {he} held on with both hands.",
        (
            "All evening {hero} mixed and stirred. Soon the whole house smelled "
            "[sweet/wonderful/delicious]."
        ),
        (
            'The next day {hero} gave {friend} the {food}. "You made this for me?" asked '
            "{friend}. {fHe} was so happy that {fhe} [danced/jumped for joy/began to sing]."
        ),
        "They shared it, down to the last crumb.",
    ),
    "fear": (
        "{hero} was afraid of {fear}. Nobody knew about it, because {he} never told anyone.",
        'One day, {friend} {fkind_clause}said, "Come with me!" But {hero} only shook {his} head.',
        '"What is wrong?" asked {friend}. "I am afraid of {fear}," whispered {hero}.',
        (
            '{friend} did not laugh. "I was afraid of it too," {fhe} said. '
            '"It helps to take one small step at a time."'
        ),
        "?{hero} thought about this for a long while.",
        (
            "So {hero} took a deep breath and took one small step. {friend} held {his} hand. Then "
            "{he} took another step, and another."
        ),
        (
            '"Look at you!" said {friend}. "You are doing it!" | '
            "After a while, {hero} noticed that {his} heart was not beating so fast any more."
        ),
        "It was still a little scary, but it was not so bad. {hero} felt [proud/brave/tall].",
        "?{hero} learned that being brave does not mean having no fear. It means to try anyway.",
    ),
    "newfriend": (
        "{hero} liked to play {at_place}, but {he} often played alone.",
        "One [sunny/windy/cloudy] day, {he} saw someone new sitting {spot}. It was {friend_intro}.",
        (
            '"Hello," said {hero}. "Do you want to play with me?" But {friend} looked at the '
            "ground and said nothing."
        ),
        "{hero} did not give up. {He} sat down and put {his} {thing} between them.",
        '?After a while, {friend} looked up. "That is a very nice {thing}," {fhe} said softly.',
        '"You can hold it," said {hero}. {friend} smiled for the first time.',
        (
            "They played until the sun went down. They [ran races/told jokes/built a castle/sang "
            "songs] and laughed a lot."
        ),
        (
            '"Will you come back tomorrow?" asked {friend}. "Of course," said {hero}. '
            '"Now we are friends."'
        ),
    ),
    "storm": (
        "One afternoon, {hero} was {at_place} when dark clouds came. {weather_bad}",
        "{He} ran as fast as {he} could and found a dry place {spot}.",
        (
            'Then {he} heard a small voice. "Please help me!" It was {friend_intro}. '
            "{fHe} was wet and cold."
        ),
        (
            '"Come in, there is room for two," said {hero}. '
            "{He} shared {his} {thing2} and {his} last piece of bread."
        ),
        "?They listened to the rain and told each other stories.",
        "At last the rain stopped, and a bright rainbow stood over {place}.",
        (
            '"Thank you for sharing with me," said {friend}. '
            '"It is easy to share with a friend," said {hero}.'
        ),
        "They walked home together and jumped into every puddle.",
    ),
    "quarrel": (
        "{hero} and {friend} {fkind_clause}did everything together.",
        (
            'One day, they found {a_thing} {at_place}. "It is mine!" said {hero}. "No, '
            'I saw it first!" said {friend}.'
        ),
        "They pulled and pulled, until the {thing} fell to the ground. Both of them began to cry.",
        '{Elder} heard the noise. "What is the matter?" {ehe} asked. They both talked at once.',
        '"A {thing} is more fun with two," said {elder}. "Why do you not take turns?"',
        "?{hero} looked at {friend}. {friend} looked at {hero}.",
        '"I am sorry," said {hero}. "You can go first." "I am sorry too," said {friend}.',
        "So they took turns, and it was much more fun than before.",
    ),
    "build": (
        "{hero} had a big plan. {He} wanted to build {build}.",
        (
            "{He} gathered [wood and rope/sticks and string/boards and nails] and carried it all "
            "to {place}."
        ),
        (
            "{He} worked the whole morning. But when {he} was nearly done, "
            "everything fell down with a crash."
        ),
        '"I will never finish it," said {hero}, and sat down on the ground.',
        (
            '{friend} {fkind_clause}came to see what the noise was. "Try again," {fhe} said, "but '
            'this time make the bottom [wider/stronger/heavier]."'
        ),
        "?They drew a plan in the sand and counted all the pieces.",
        (
            "The two friends worked side by side. {hero} held the pieces, "
            "and {friend} tied them together."
        ),
        (
            'By the evening it was done. "We built {build}!" shouted {hero}. '
            "It was even better than {he} had hoped."
        ),
        "?Everyone who passed by stopped to look at it.",
    ),
    "rescue": (
        "One day, {hero} was walking {at_place} when {he} heard a strange sound.",
        "{He} looked {spot} and found {hurt}.",
        '"Do not be afraid," said {hero}. "I will help you." But {he} did not know what to do.',
        (
            "So {he} ran to {elder}. {Elder} listened and nodded. "
            '"We must be slow and gentle," {ehe} said.'
        ),
        (
            "Together they went back. {hero} spoke in a quiet voice, "
            "and {elder} helped with careful hands."
        ),
        "?It took a long time, but they did not hurry.",
        "At last the little animal was safe. It looked at {hero} as if it wanted to say thank you.",
        (
            "?Every day after that, {hero} went back to {place}, "
            "and every day the little animal came to say hello."
        ),
        '"You have a kind heart," said {elder}. {hero} felt warm inside.',
    ),
    "find": (
        "One day, {hero} was playing {at_place}. {weather}",
        "There, {spot}, {he} found {find}. {He} had never seen anything like it.",
        (
            '{He} ran to show it to {friend} {fkind_comma}"What do you think it is for?" {he} '
            'asked. "Let us find out!" said {friend}.'
        ),
        (
            "They walked over the hill and across the stream. They asked {elder}, "
            "but {ehe} did not know."
        ),
        (
            "?The path grew narrow, and it was getting late. "
            '"We should not give up now," said {friend}.'
        ),
        (
            "At last they came to a wall covered with green leaves. {hero} pushed the leaves "
            "aside, and behind them was {treasure}."
        ),
        '"It is beautiful," whispered {friend}. They stood there for a long time.',
        "They promised to keep it a secret, but they came back every week.",
    ),
    "garden": (
        (
            'In the spring, {elder} gave {hero} a tiny bag of seeds. "If you are patient, you '
            'will have {plant}," {ehe} said.'
        ),
        "{hero} dug [a hole/a small bed] behind the house, put the seeds in and gave them water.",
        "The next day nothing had happened. The day after that, there was still nothing.",
        (
            '"It does not work!" said {hero}. "Wait a little longer," said {friend} '
            '{fkind_stop}"Good things take time."'
        ),
        (
            "So {hero} watered the ground every day. {He} [sang to it/talked to it/told it "
            "stories] and pulled out the weeds."
        ),
        "?Then came three days of rain, and {he} had to wait inside.",
        "One morning, {he} saw something green. It was very small, but it was there!",
        "All summer long it grew and grew, and by the autumn {hero} had {plant}.",
        "{He} shared it with {friend} and with all the neighbours.",
    ),
    "race": (
        "Every year there was a big race {at_place}. {hero} wanted to win more than anything.",
        "{He} practised every day. {friend} {fkind_clause}practised too.",
        'On the day of the race, everybody came to watch. "Ready, steady, go!" called {elder}.',
        "{hero} ran like the wind. Soon {he} was ahead of all the others.",
        "But near the end, {he} heard a cry. {friend} had fallen and could not get up.",
        "?{hero} looked at the finish line. It was so close.",
        (
            "{hero} stopped, turned around and ran back. {He} helped {friend} to stand, and they "
            "walked the last part together."
        ),
        (
            'They came in last, but everyone cheered. "You did not win the race," said {elder}, '
            '"but you won something better."'
        ),
    ),
    "truth": (
        (
            'One rainy day, {hero} was playing inside with {a_thing}. {Elder} had said, "Be '
            'careful!" but {hero} did not listen.'
        ),
        "Crash! A [blue vase/big plate/clay pot/glass jar] fell down and broke into many pieces.",
        "{hero} was scared. {He} hid the pieces {inspot} and told nobody.",
        (
            "But {he} could not sleep that night. {His} tummy hurt, "
            "and {he} thought about it all the time."
        ),
        '?"You look so pale," said {friend} {fkind_stop}"It is better to tell the truth."',
        'In the morning, {hero} went to {elder}. "I broke it," {he} said. "I am so sorry."',
        (
            '{Elder} was quiet for a moment. Then {ehe} smiled. "Thank you for telling me. '
            'That was brave."'
        ),
        (
            "They glued the pieces together. It did not look the same, "
            "but they both liked it even more."
        ),
    ),
    "wayhome": (
        (
            "One day, {hero} followed a [butterfly/bright bird/shiny dragonfly] deep into the "
            "woods. {He} did not look where {he} was going."
        ),
        "When {he} stopped, all the trees looked the same. {He} was lost.",
        '"I must stay calm," said {hero}. {He} sat down and listened.',
        (
            "Far away {he} could hear [a bell/running water/someone singing]. "
            "{He} walked slowly towards the sound."
        ),
        "?On the way {he} picked up small white stones and dropped them behind {him}.",
        'Soon {he} met {friend_intro}. "I know the way," said {friend}. "Follow me!"',
        (
            "They walked past the [old oak/round rock/fallen tree] and over a little bridge, "
            "and there was {place}."
        ),
        '{Elder} came running. "There you are!" {ehe} cried, and held {hero} close.',
        '"Next time I will look where I am going," said {hero}.',
    ),
    "wish": (
        "Every night, {hero} looked at the stars from {his} window.",
        (
            'One night a star fell from the sky. "Make a wish!" said {friend} {fkind_stop}{hero} '
            "closed {his} eyes and wished for {a_thing}."
        ),
        "In the morning {he} looked everywhere, but there was no {thing}. {hero} was sad.",
        "Then {he} went {to_place} and saw {friend} alone {spot}. {fHe} looked even sadder.",
        '"I wished for a friend to play with," said {friend}, "but nobody came."',
        '"I am here," said {hero}. They played all day long, and {hero} forgot about the {thing}.',
        "?In the evening they lay in the grass and counted the stars together.",
        (
            '"My wish came true," said {friend}. "Mine too," said {hero}. '
            '"It was only a different one."'
        ),
    ),
    "skill": (
        "{hero} wanted to learn how to {skill}. All the others could do it, but {he} could not.",
        "{He} tried on Monday, and it went wrong. {He} tried on Tuesday, and it went wrong again.",
        '"I am just not good at it," {he} said to {elder}.',
        (
            '{Elder} laughed. "When I was young, I could not {skill} either," {ehe} said. '
            '"I tried a hundred times."'
        ),
        (
            "So {hero} went to {place} and tried again. "
            "{friend} {fkind_clause}watched and clapped {fhis} hands."
        ),
        "?{He} fell down, got up, and tried once more.",
        "On Sunday, it worked! {hero} could {skill}!",
        (
            '"Can you teach me?" asked {friend}. "Yes," said {hero}, '
            '"but you must try a hundred times."'
        ),
    ),
    "helper": (
        (
            "{hero} had an important job. {He} took care of the [old lamp/big clock/water "
            "wheel/little engine] {at_place}."
        ),
        "Every morning {he} cleaned it, and every evening {he} checked that it was working.",
        "One night it stopped. There was no sound at all. Everyone in the village began to worry.",
        (
            'They asked {elder}, but {ehe} could not repair it. "Let me try," said {hero}. "You '
            'are too small," said the others.'
        ),
        (
            "Only {friend} {fkind_clause}believed in {him}. "
            '"You are small enough to look inside," {fhe} said.'
        ),
        (
            "{hero} climbed in and looked around. There, between two wheels, was {a_thing}! {He} "
            "pulled and pulled until it came out."
        ),
        "?{He} put a drop of oil on every wheel.",
        'At once it began to move again. "Hooray for {hero}!" everyone shouted.',
        "After that, nobody said that {hero} was too small.",
    ),
}
