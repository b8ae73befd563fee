"""Words that a story may vary: wherever a template has a phrase, the story says it in its own way, throughout.

A reader learns a story's manner from its beginning. Without such variety the same eight words would come up in
story after story, and a model could write by copying.
"""

from __future__ import annotations

_SYNONYMS = """
wanted to: wanted to, hoped to, wished to, longed to
found: found, discovered
found out: found out, discovered
could not: could not, couldn't
did not: did not, didn't
do not: do not, don't
Do not: Do not, Don't, Never
was not: was not, wasn't
cannot: cannot, can't
I am: I am, I'm
I will: I will, I'll
It is: It is, It's
Let us: Let us, Let's
That is: That is, That's
nobody: nobody, no one
Nobody: Nobody, No one
everybody: everybody, everyone
Everybody: Everybody, Everyone
together: together, side by side
because: because, since
But: But, Yet
Never mind: Never mind, That can happen, No harm done
But where: But where, And where
had eaten all: had eaten all, had taken all, had run off with all
every shelf: every shelf, every drawer, the whole kitchen
Do you have: Do you have, Can you spare, May I have
asked for: asked for, begged for, hoped for
on the way back: on the way back, on the way home
On the way back: On the way back, On the way home, Halfway home
a bag full of: a bag of, a jar of, two bags of, a lot of
came last: came last, went in last, was the last thing
smelled wonderful: smelled wonderful, smelled good, was full of steam, became warm
It was far too much: It was far too much, Oh dear, What a mess
After an hour: After an hour, When it was ready, A little later
waited and waited: waited and waited, waited a long time, waited with a spoon
felt much better: felt much better, sat up in bed, was well the next day
took a bite of: took a bite of, tasted, ate
the biggest: the biggest, the finest, the tallest
all by: all by, without help and only with
nobody may help me: nobody may help me, nobody may touch it, I need no help
on top of: on top of, beside, in the middle of
grew and grew: grew and grew, became taller, looked better and better
the left side: the left side, the front, the lower half
the right side: the right side, the back, the upper half
was left: was left, could be saved, was still there
We can build it again: We can build it again, Let us begin again, It is not too late
This time: This time, Now, From now on
Let us try: Let us try, We could use, What about
Two can build better than one: Two can build better than one, Let me help you, You should not do it alone
stood firm: stood firm, was strong, could not fall
they began again: they began again, they built it up again, they started over
was much stronger: was much stronger, looked even better, could stand any storm
was done: was done, was ready, stood there
came to see: came to see, talked about, admired
dug a hole: dug a hole, found a place, chose a good spot
gave it some water: gave it some water, watered it, put it in the sun
nothing to see: nothing to see, nothing there, only earth
Be patient: Be patient, Just wait, Give it time
will never grow: will never grow, is surely dead, is only a stone
is asleep: is asleep, is shy, needs a song, is thirsty
Where is: Where is, What about, How is
pulled the weeds: pulled the weeds, chased the snails away, loosened the earth
wanted to eat: wanted to eat, began to eat, came to nibble at
a green leaf came up: a green leaf came up, something green came up, the earth opened
as tall as: as tall as, taller than, almost as tall as
You were right: You were right, I was wrong, I am sorry that I laughed
More than anything: More than anything, All year long, Day and night
I wish I could: I wish I could, If only I could, How I would love to
better than anybody: better than anybody, as well as anybody, best of all
I will never try again: I will never try again, I give up, It is too hard for me
The trick is to: The trick is to, You must remember to, The most important thing is to
It was a little better: It was a little better, That helped a bit, It almost worked
did not give up: did not give up, tried again, got up again, only laughed
for luck: for luck, this time, to feel brave
as if it were nothing: as if it were nothing, without any trouble, with a big smile
I am the fastest: I am the fastest, I am the best, I run like the wind
Nobody can beat me: Nobody can beat me, I always win, They are all too slow for me
You are much too slow: You are much too slow, A snail is faster than you, You would need all day
talked about it: talked about it, bragged about it, told everybody so
The winner would get: The winner would get, The first one there would get, They ran for
far ahead: far ahead, far in front, in the lead
I have time to: I have time to, Now I can, Why not
fell asleep: fell asleep, began to snore, slept at once
was tired: was tired, was out of breath, felt weak
it was too late: it was too late, that did not help, it was no use
had won: had won, had earned, already held
You were great: You were great, You ran well, Well done
had hurt: had hurt, had broken, could not move
wanted to play: wanted to play, would have liked to play, hoped to play
needs me: needs me, needs help, is all alone
Who will: Who will, Who can, Who is going to
had to chase it out: had to chase it out, lured it out, carried it out
was clean: was clean, was tidy, looked like new, shone
What can I give you: What can I give you, How can I pay you, What would you like for it
when nobody: when nobody, while nobody
Please take: Please take, Could you bring, I want you to carry
and be there by: and be there by, and hurry, they close at, come home by
do not talk to strangers: do not talk to strangers, stay on the path, do not run
do not lose it: do not lose it, do not open it, hold it tight
It will not take long: It will not take long, Just for a minute, It is so near
I promised: I promised, I gave my word to
stopped for a moment: stopped for a moment, could not go on, forgot the time
Is this your letter: Is this your letter, Did you drop this, Do you need this
read the: read the, took the, looked at the
You kept your promise: You kept your promise, I can trust you, You did well
Who is: Who is, Who could be
There was one thing that made: There was one thing that made, Only one thing in the world made, One thing always made
at all: at all, one bit, in the least
I know what helps: I know what helps, There is a way, Listen to me
And remember: And remember, Do not forget
All you need is: All you need is, Just think of, Have you tried
one step: one step, a small step
and then one more: and then one more, and another, then two, and did not look back
held the hand of: held the hand of, stayed close to
And what was it: And what was it, And what did they see, And the truth
and nothing more: and nothing more, that was all, what a surprise
Is that all: Is that all, And for that I was afraid, How silly I was
could not get out: could not get out, called for help, was too weak to move, shook all over
with sad eyes: with sad eyes, and did not move, and hoped for help
pulled and pulled: pulled and pulled, pushed with both hands, tried everything
was too short: was too short, tore at once, slipped off
We need: We need, What we need is, Now we need
to get one: to get one, to find one, to borrow one
was free: was free, came loose, could move again
I will never forget you: I will never forget you, You saved my life, Now we are friends
where its mother waited: where its mother waited, where its brothers were, and looked back once
Stay close to: Stay close to, Do not go farther than, Always stay near
all alone: all alone, alone, quite alone
had never been: had never been, did not want to be, knew nobody
It got dark: It got dark, Night fell, It grew cold
everything looked the same: everything looked the same, there was no path, nothing helped
I want to go home to: I want to go home to, I came from, I must go back to
I do not know the way: I do not know the way, it is too dark, I am lost
we can see: we can see, one can see, we will find
Look for: Look for, First we must find, Let us look for
the rest of the way: the rest of the way, all the way, without a stop
was waiting with: was waiting with, stood there with, had made
Never do that again: Never do that again, I looked everywhere, You must be hungry
could not sleep: could not sleep, lay awake, turned from side to side
when it got dark: when it got dark, when the lamp went out, when all was quiet
What was that: What was that, Who was there, Again and again
a strange sound: a strange sound, a low sound, a noise
It must be: It must be, I bet it is, What if it is
who wants: who wants, who is after, who came for
heard it too: heard it too, woke up, sat up
opened the door: opened the door, looked around the corner, went first
Step by step: Step by step, Slowly, On bare feet
was asleep: was asleep, was snoring, slept in the next room
And then they saw it: And then they saw it, Then they held up the lamp, And there it was
woke up: woke up, came in, heard them
Choose well: Choose well, Think first, Be quick, But be careful
What do you wish for: What do you wish for, What would you like, Tell me your wish
But soon it was too much: But soon it was too much, But it did not stop, But that was a mistake
did not fit anymore: did not fit anymore, turned to paper, flew away
fell over: fell over, cracked, shook
there was no room left: there was no room left, nobody had room, it was too tight
could not get through the door: could not get through the door, did not know the place, hardly said a word
without a word: without a word, very slowly, with a sigh
I liked it better when: I liked it better when, I was happy when, Do you remember how
make everything as it was: make everything as it was, take it all back, stop it
and all was well: and all was well, and it was over, as if nothing had happened
gave everything back: gave everything back, returned it all, gave it all back
Somebody new: Somebody new, A new neighbor, A new child
Nobody wanted: Nobody wanted, Not one child wanted, Everybody was too busy
nobody to eat it with: nobody to eat it with, no friend to share it, was not hungry
The others: The others, Some children, The big ones
is too: is too, looks too, seems too
to say something: to say something, to go over, to say hello
I know how: I know how, I can show you how, My mother taught me how
Do you want to: Do you want to, Would you like to, Shall we
Come with me: Come with me, Do not sit here alone, Get up
for the first time: for the first time, at last, all day
Today we will have: Today we will have, What a day for, Let us have
sang a song about: sang a song about, talked about, made up a joke about
drops fell: drops fell, rain fell, it poured
the sky turned dark: the sky turned dark, big clouds came, the sun went away
There it was dry: There it was dry, Nobody got wet there, They waited there
made a roof: made a roof, built a tent, made a shelter
let them in: let them in, gave them towels, made them tea
They were hungry: They were hungry, They had not eaten for days, They all looked thin
You may have it: You may have it, Eat as much as you like, Keep it
told a story: told a story, sang a song, told a joke
what was left: what was left, the crumbs, the rest
big: big, large, huge
small: small, little, tiny
friend: friend, playmate, buddy
tried to: tried to, attempted to
looked at: looked at, stared at, gazed at, glanced at
look at: look at, stare at, marvel at
and then: and then, and soon
hugged: hugged, embraced, cuddled, squeezed
waved at: waved at, nodded to, winked at
sat down: sat down, settled down, knelt down
held the: held the, gripped the, clutched the
wonderful: wonderful, lovely, marvelous, splendid, delicious
whole: whole, entire
Maybe: Maybe, Perhaps
next to: next to, close to, right by
only: only, just
every: every, each
Every: Every, Each
was gone: was gone, was missing, had vanished
fell apart: fell apart, fell to pieces, broke down
for a moment: for a moment, for a while, for a second, for a minute
ran: ran, rushed, dashed
wanted: wanted, wished for, longed for
Oops: Oops, Whoops, Oh no
Poof: Poof, Whoosh, Zap
brought: brought, carried
road: road, lane, street
worked: worked, toiled
trick: trick, secret
toy: toy, treasure, possession
Once more: Once more, Again, Once again
bring: bring, take, carry
jumped: jumped, leaped, sprang
pulled: pulled, tugged
carried: carried, hauled, lugged
bought: bought, purchased
fix: fix, repair, mend
tears: tears, teardrops
came back: came back, returned
some: some, plenty of, lots of
some to: some to, a few to, a little to
some of: some of, most of, a part of
was not there anymore: was not there anymore, was nowhere to be seen, could not be found, was no longer there
put it down: put it down, left it, set it down
Did you lose: Did you lose, Are you looking for, Have you lost
but there was only: but there was only, but all they saw was, but they only came upon
with something: with something, holding something, dragging something
in its mouth: in its mouth, between its teeth, on its back
had taken it to: had taken it to, had hidden it in, had dragged it to, had brought it to
May I: May I, Can I, Could I
may I: may I, can I, could I
have a turn: have a turn, try it once, play with it too
is mine: is mine, belongs to me, is not for you
Go away: Go away, Leave me alone, Stay back
but it was no fun without: but it was no fun without, but it felt wrong without
It tastes better when we share: It tastes better when we share, See how good that is, Half is enough for me
Would you rather have: Would you rather have, What is worth more to you
It is your turn: It is your turn, Now it is yours, Take it
They took turns until: They took turns until, They shared it until, They played on until
Never touch the: Never touch the, Stay away from the, Be careful with the
that belonged to: that belonged to, that was very dear to, that was a present for
bumped into: bumped into, fell against, ran into, stumbled over
too fast: too fast, too quickly, in a hurry
happened to: happened to, became of
I do not know: I do not know, How should I know, Who can say
every time: every time, each time, whenever
I did it: I did it, It was my fault, I have to tell you something
It was me: It was me, I did it, It was my fault
about the: about the, because of the
Thank you for telling me the truth: Thank you for telling me the truth, You were honest with me, That was hard to say
is worth more: is worth more, matters more, is dearer to me
I am also proud of you: I am also proud of you, I love you, you were honest
Together: Together, Side by side, That same day
with glue: with glue, with thick glue, with clay and paint, piece by piece
To say sorry: To say sorry, To make up for it, After that
very much: very much, badly, more than anything
dreamed of: dreamed of, thought of, could not forget
It cost: It cost, The price was, One had to pay
counted: counted, looked through
needed: needed, lacked
needed help: needed help, had too much work, looked for somebody
It was hard work: It was hard work, That was not easy, It took a long time
very dirty: very dirty, wet and dirty, full of dust
Well done: Well done, Good work, You earned this, Many thanks
Now the: Now the, From then on the, And so the
On the way to: On the way to, Near, Not far from
who had nothing to eat: who had nothing to eat, who was very hungry, who had lost a purse
thought it was much better than: thought it was much better than, liked it more than, wished to have it instead of
is boring: is boring, is old, is no good
so much nicer: so much nicer, far better, really special
but it was not as much fun as: but it was not as much fun as, but it was harder than, but it was not at all what
missed: missed, longed for
From far away: From far away, Over the fence, Through the trees
May I have: May I have, Please give me, I would like
in both arms: in both arms, with a sigh, at once
They swapped again: They swapped again, So they swapped back, Each took back the old toy
an old map: an old map, a strange map, a yellow map, a rolled map
fell out: fell out, came out, dropped to the floor
Let us go together: Let us go together, Follow me, We need each other
The map said: The map said, On it somebody had written, It read
there was only: there was only, they saw only, there lay only
Nothing: Nothing, Still nothing, No luck
an old boot: an old boot, a broken cup, a bent nail, a gray bone
a spoon: a spoon, a button, an egg, an empty bottle
hit something hard: hit something hard, struck wood, went clank, would not go deeper
a chest full of: a chest full of, a box of, a bag with
pulled out: pulled out, dug out, lifted out
gave half of: gave half of, shared, gave much of
something special: something special, a real surprise, the best present
always wanted: always wanted, long wanted, often dreamed of
would not see it: would not see it, would be surprised, knew nothing of it
was ruined: was ruined, was all gone, ran down
fell down: fell down, tipped over, slid from the shelf
helped to mend: helped to mend, knew how to save, showed them how to save
everybody sang for: everybody sang for, they danced with, there was music for
opened the: opened the, unfolded the, tore off the
were wet: were wet, shone, were full of joy
wants: wants, needs
too.: too., as well.
again.: again., once more., anew.
past: past, by, around
When: When, As
should: should, ought to
should not: should not, ought not to
went on: went on, kept going, continued
far away: far away, a mile away, a long way off
First: First, At first
in front of: in front of, outside
The first time: The first time, On the first try
another: another, one more
"""

# verb: adverbs that may stand before it
_ADVERBS = """
looked: quickly, slowly, shyly, proudly
took: quickly, gladly, quietly, eagerly
took the: quickly, gladly, quietly, eagerly
put: quickly, carefully, gently, proudly
put the: quickly, carefully, gently, proudly
opened: slowly, carefully, eagerly, boldly
gave: gladly, kindly, shyly, gently, proudly
carried: proudly, carefully, slowly, gladly
sat: quietly, calmly
waited: calmly, quietly, nervously
helped: gladly, kindly, often
played: happily, often, gladly
clapped: loudly, gladly, wildly
packed: quickly, neatly, carefully, gladly
dug: eagerly, slowly, deeply
read: slowly, silently
brought: kindly, proudly, gladly, soon
closed: slowly, firmly
dropped: clumsily, suddenly
sang: softly, loudly, sweetly
built: slowly, proudly, carefully
fetched: quickly, gladly
pointed: rudely, loudly
dried: gently, slowly
"""

# noun: adjectives that may stand before it
_ADJECTIVES = """
letter: folded, secret, sealed, long, short, crumpled
coins: copper, bright, round, heavy
map: torn, dusty, folded, faded, secret
seed: tiny, round, hard, shiny, flat
basket: round, deep, heavy, woven
feet: bare, cold, dusty, tired
leaf: tiny, round, shiny, tender
bag: paper, leather, heavy, torn, cotton
song: merry, silly, sweet, short
mouth: wide, little, muddy
pot: deep, round, heavy, shiny, copper
chest: heavy, wooden, rusty, locked, dusty
hole: deep, small, round, narrow
shelf: dusty, high, low, wooden
plan: secret, clever, simple, bold
lid: heavy, rusty, creaky
cross: crooked, thick, faded
boot: torn, smelly, muddy
flag: paper, little, torn, ragged
chair: creaky, wooden, broken, low
glue: sticky, strong, thick
tree: tall, bent
kitchen: warm, little, tidy, bright
winner: lucky, proud, final
stories: funny, long
"""


def _read(table: str) -> dict[str, tuple[str, ...]]:
    rows = (line.split(":") for line in table.strip().splitlines())
    return {phrase: tuple(word.strip() for word in words.split(",")) for phrase, words in rows}


def _phrases() -> dict[str, tuple[str, ...]]:
    phrases = _read(_SYNONYMS)
    for phrase, words in (_read(_ADVERBS) | _read(_ADJECTIVES)).items():
        same = phrases.get(phrase, (phrase,))
        phrases[phrase] = same + tuple(f"{word} {plain}" for word in words for plain in same)
    return phrases


PHRASES = _phrases()
"""What may stand for each phrase: itself or a synonym, perhaps with an adverb or an adjective before it."""
