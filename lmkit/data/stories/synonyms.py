"""What a story may say instead: a phrase of the templates, a colon, what may stand for it.

Commas separate, or semicolons where a phrase has commas of its own.
"""

SYNONYMS = """
Whoosh: Whoosh, Bang, Oh
It was there, and it was so: It was there, and it was so; Up it rose, so; There it stood, so
Half for you and half for me: Half for you and half for me, We will share it, One part is yours
stayed for the night: stayed for the night, slept there, was the guest
lay in bed and remembered: lay in bed and remembered, could not forget, dreamed of, saw again and again
knew how it felt to be: knew how it felt to be, had once been, did not like anybody to be
Why are you so: Why are you so, What makes you so, Tell me why you are
Then the stars came out over: Then the stars came out over, Soon the moon shone on, Night came to
I want to go back to: I want to go back to, I wish I were with, Please call
and off they went to: and off they went to, and both ran toward, and they were on the way to
You know what I always say: You know what I always say, Have you forgotten, You must know
I should not have done that: I should not have done that, That was mean of me, I feel ashamed
How can I thank you: How can I thank you, What can I do for you, How did you do that
Do you know the way to: Do you know the way to, Which way is it to, How far is it to
will have a birthday: will have a birthday, will be a year older, will want a cake
who had just come to: who had just come to, who was new in, who had moved to
were the best of friends: were the best of friends, shared everything, were never bored
we will race to: we will race to, let us run to, we shall see who comes first to
Nothing was as good as to: Nothing was as good as to, It was so much better to, It had been lovely to
to come along to: to come along to, to be on time at, to go to
the sun went down behind: the sun went down behind, the sun sank behind, it grew dark around
more than anything in the: more than anything in the, more than all other things in the
kept it on at night: kept it on at night, never took it off, washed it every week
it was the birthday of: it was the birthday of, there was a party for
in the window of the: in the window of the, on a shelf in the, behind the glass of the
had to get it back: had to get it back, wanted it back, could not leave it there
did its work, and: did its work, and; was strong enough, and; helped, and
a new family in: a new family in, somebody who had moved to
a deep breath: a deep breath, one step forward, a sip of water
Not one cloud hung above: Not one cloud hung above, A blue sky stretched over, Birds sang all over
It was so hot that: It was so hot that, The sun burned so much that
It was late in: It was late in, Everybody slept in, It was dark and quiet in
It blew so hard that: It blew so hard that, The gusts were so strong that
Gray clouds hung over: Gray clouds hung over, The sun hid behind, No sound came from
At the end they sold: At the end they sold, That day they sold, By noon they had sold
At sunset the sky over: At sunset the sky over, Late in the day the sky above, Behind the roofs of
A light breeze came from: A light breeze came from, A cool wind blew past, Smoke rose behind
I wish I had a: I wish I had a, Oh for a, I would be happy with a
and that helped a little: and that helped a little, and soon it was not so bad, and they ate it in bed
We will find a way: We will find a way, It will be all right, There is always a way
I wish that everything were: I wish that everything were, Make all things, Let the whole town be
Did you hear that: Did you hear that, What is that, Listen! What was that
you may still see: you may still see, look for, nobody can miss
was as blue as: was as blue as, shone like, was as clear as
used a piece of: used a piece of, cut a corner from, took a thread from
too when I was: too when I was, at first when I was, often when I was
to race with me: to race with me, to win, for a race
saw how hungry the: saw how hungry the, saw how thin the, felt sorry for the
a new face: a new face, a stranger, somebody new
rang a bell, and: rang a bell, and; clapped, and; whistled, and
must be near it: must be near it, is not far from there, cannot be far
looked for the way: looked for the way, tried the path, felt around
it rained on the: it rained on the, water ran over the, milk was spilled on the
help you find: help you find, help you look for, go with you and find
had never been so: had never been so, was more than, had every reason to be
had landed there, and: had landed there, and; was right there, and; had rolled there, and
for both of them: for both of them, and gave away half of it, and shared it
could run faster than: could run faster than, had longer legs than, always won against
come with you: come with you, come along, be your captain
called them to the: called them to the, brought them back to the, rang for them at the
by the name of: by the name of, who was called
talked to the: talked to the, told the, whispered to the
With the last wish: With the last wish, With a sigh, Right away
Not far from the: Not far from the, Two doors from the, Down the road from the
At lunch there was: At lunch there was, At noon they ate, For lunch they cooked
One, two, three! The: One, two, three! The; Hey ho! The; With a pop the
It will be a: It will be a, One day it will be a, From it comes a
For that we need: For that we need, Bring me, First we must find
Are we still friends: Are we still friends, Can you forgive me, Will you play with me again
we came from there: we came from there, that is the way, we were here before
thunder rolled over: thunder rolled over, lightning struck near
and they danced around: and they danced around, and they sang near, and they raced past
and the way led: and the way led, and the road went
and behind it the: and behind it the, and next to it the, and not far from it the
all the color: all the color, every bit of it
You are a true: You are a true, You are my best, I never had such a
If you want to: If you want to, When you try to, Before you can
I want a hundred: I want a hundred, Give me all the, I wish for a room full of
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
had eaten all: had eaten all, had taken all, had run off with all
every shelf: every shelf, every drawer, the whole kitchen
Do you have: Do you have, Can you spare, May I have
asked for: asked for, begged for, hoped for
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
Where is: Where is, What about
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
I have time to: I have time to, Now I can, Why not
fell asleep: fell asleep, began to snore, slept at once
was tired: was tired, was out of breath, felt weak
it was too late: it was too late, that did not help, it was no use
had won: had won, had earned, already held
You were great: You were great, You ran well, Well done
had hurt: had hurt, had broken, could not move
needs me: needs me, needs help, is all alone
Who will: Who will, Who can, Who is going to
had to chase it out: had to chase it out, lured it out, carried it out
was clean: was clean, was tidy, looked like new, shone
What can I give you: What can I give you, How can I pay you, What would you like for it
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
Is that all: Is that all, Is it only that, Was it nothing more
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
Come with me: Come with me, Follow me, Let us go
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
wonderful: wonderful, lovely, marvelous, splendid
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
ran down: ran down, rolled down
wanted: wanted, wished for, longed for
Oops: Oops, Whoops, Oh no
Poof: Poof, Whoosh, Zap
brought: brought, carried
road: road, lane, street
worked: worked, toiled
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
Thank you for telling me the truth: Thank you for telling me the truth, You were honest with me, That was hard to say
is worth more: is worth more, matters more, is dearer to me
I am also proud of you: I am also proud of you, I love you, you were honest
Together: Together, Side by side, That same day
with glue: with glue, with thick glue, with clay and paint, piece by piece
To say sorry: To say sorry, To make up for it, After that
dreamed of: dreamed of, thought of, could not forget
It cost: It cost, The price was, One had to pay
needed: needed, lacked
needed help: needed help, had too much work, looked for somebody
It was hard work: It was hard work, That was not easy, It took a long time
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
went on: went on, kept going, continued
far away: far away, a mile away, a long way off
First: First, At first
in front of: in front of, outside
The first time: The first time, On the first try
another: another, one more
"""
