"""Generate a corpus: English stories of any size, the same for a seed on every machine.

A story is drawn from a grammar. In its rules

    [a|b]    picks one; it nests and may be empty
    <rule>   expands a rule, anew each time
    {name}   is a fact: drawn when the story first needs it, then kept. {name2} is another of its kind, {row.column}
             belongs to the row that was drawn for {row}, {Name} begins with a capital
    //       begins a paragraph

and words of `VOICE` are facts, too. Facts hold a story together: the kite that is lost in the first paragraph is the
kite that is found in the last. They give a language model something to learn beyond pairs of words.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.measure.progress import Progress
from lmkit.recipe import END_OF_TEXT
from lmkit.storage import atomic_path
from lmkit.storage.outputs import refuse_existing, refuse_too_large

_PROGRESS_EVERY = 1 << 20
_PRONOUNS = {
    "girl": {"he": "she", "him": "her", "his": "her"},
    "boy": {"he": "he", "him": "him", "his": "his"},
}
_BEFORE_VOWEL = re.compile(r"(?<=\b[Aa]) (?=[aeio]|hon|ug)")  # "a apple" -> "an apple"
WORDS = """
girl: Ada Alice Amber Anna Bella Beth Carla Clara Cora Daisy Dora Ella Emma Eva Faith Fiona Freya Gina Grace Heidi
  Holly Ida Iris Ivy Jane Jenny Julia Kate Laura Lena Lily Lola Lucy Maria Maya Millie Molly Nora Olive Pearl Polly
  Rosa Ruby Sara Stella Tess Tilly Uma Vera Wendy Willa Yara Zara Zoe Abby Agnes Alma April Astrid Ava Betty Celia
  Daphne Della Elsa Emily Erika Flora Gemma Gloria Hannah Hope Ingrid Jade Joan Joy Kira Luna Mabel Nadia
boy: Aaron Adam Albert Alfie Arlo Ben Billy Boris Brian Caleb Carl Colin Dan David Dylan Eddie Emil Ethan Felix Finn
  Frank Fred George Gus Hank Harry Henry Hugo Ian Isaac Jack Jacob Joel Jonah Juan Karl Leo Liam Lucas Marco Max Milo
  Nate Noah Omar Oscar Owen Pablo Paul Peter Ralph Ray Robin Roy Sam Simon Theo Tim Toby Tom Victor Walter Will Zack
  Abe Alan Alex Andy Anton Arthur Basil Bert Bruno Casper Diego Eli Eric Igor Ivan James Kit Lars
pet: Acorn Bandit Biscuit Bramble Bubbles Button Caramel Chip Clover Cookie Crumb Fluff Freckle Ginger Honey Maple
  Misty Moss Muffin Nibbles Patch Peanut Pebble Pepper Pickle Puddle Rusty Scout Smoky Socks Sunny Waffles
girl_elder: Mom Grandma Aunt Granny Nana
boy_elder: Dad Grandpa Uncle Gramps Cousin
girl_title: Mrs. Miss
boy_title: Mr. Captain
species: fox rabbit bear hedgehog badger otter raccoon lamb puppy turtle penguin monkey koala panda pony beaver
  gosling piglet toad weasel lynx camel seal hamster ferret
trait: kind shy brave curious clever cheerful quiet careful gentle lively messy patient playful polite proud silly
  sleepy stubborn thoughtful noisy helpful friendly lazy dreamy bold busy honest bossy cheeky calm eager grumpy jolly
  loyal moody nosy restless sensible serious stern timid tough witty charming daring earnest gruff humble modest
look: small tall skinny round freckled chubby lanky nimble sturdy rosy scruffy slender graceful clumsy tidy fluffy
  pale stout wiry plump cute dainty
color: red blue green yellow purple orange pink brown white black golden silver gray striped spotted violet crimson
  turquoise beige copper ivory maroon
critter: ant bee beetle butterfly calf camel caterpillar cat chicken cow crab cricket deer dog dolphin donkey
  dragonfly eagle ferret firefly hare heron horse ladybug lizard lobster magpie mole moth newt parrot peacock pelican
  pigeon raven rooster salmon seal sheep snail spider stork swan toad trout weasel woodpecker worm
trinket: anchor apron badge balloon basket blanket bottle broom brush button candle carpet chest clock coin compass
  cup curtain cushion fan feather flag fork helmet hoop key kettle ladle lamp letter locket magnet marble medal
  mitten needle paddle pencil pillow pot quilt ribbon ring saddle spoon stool teacup ticket umbrella whistle
snack: almonds, apples, bagels, biscuits, cabbage, cake, candy, caramel, cherries, chestnuts, chowder, crackers,
  cucumbers, dates, donuts, figs, fudge, gingerbread, granola, grapes, honey, jelly, lentils, mashed potatoes,
  muffins, noodles, nuts, olives, omelets, peaches, peas, pickles, plums, popcorn, porridge, pretzels, pudding,
  raisins, rice, stew, toast, waffles, yogurt
shape: big shiny soft old new smooth heavy dusty odd huge long narrow square curved plain wooden fancy battered
cloth: wool cotton velvet silk leather knitted linen fleece checkered quilted
garment: hat scarf coat cap sweater jacket ribbon cape apron vest shirt hood cloak bonnet poncho
taste: warm fresh sweet creamy crunchy spicy steaming homemade buttery tender salty sour cold fried leftover sticky
voice: soft low high clear deep merry sleepy warm shaky loud squeaky calm hoarse husky rough thin sweet firm hollow
  bright
how: slowly quickly quietly bravely eagerly carefully gladly calmly proudly nervously politely dreamily shyly happily
  boldly gently warmly wearily sternly neatly briskly kindly silently firmly loudly patiently sweetly humbly merrily
  swiftly
weather: sunny rainy windy snowy foggy hot cloudy stormy bright misty frosty chilly mild breezy gray warm icy damp
  dull fresh wet dry hazy crisp
day: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
time: morning afternoon evening
number: two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen twenty thirty
  forty fifty sixty seventy
first: Apple Berry Birch Cherry Clover Copper Elm Fern Fox Gold Hazel Iron Lake Lark Maple Mint Moon Oak Pine Plum
  River Rose Sand Silver Snow Star Stone Thistle Thorn Willow Wind Wood
last: Bay Bridge Corner Creek Falls Grove Harbor Hill Hollow Meadow Ridge Springs Valley
hut: cottage house cabin hut bungalow farmhouse lodge mill tower houseboat
hut_look: crooked cozy narrow sunny quiet drafty tidy shabby humble snug creaky
game: hide and seek, tag, pirates, leapfrog, checkers, hopscotch, tug of war, knights, explorers, charades, marbles
trap: stuck in the mud, caught in a net, trapped under a branch, tangled in string, stuck in a pipe, caught in
  brambles
tool: rope ladder shovel saw hook crowbar rake broom plank lantern hammer wheelbarrow
treasure: gold coins, glass beads, tin soldiers, silver spoons, letters from long ago, paper stars, music boxes,
  puppets
virtue: Patience Courage Kindness Honesty Hope Friendship Laughter Wisdom Gratitude Trust
deed: opens every door, weighs more than gold, lights the darkest road, makes a small house big, finds its way home,
  melts the hardest ice, is a good breakfast, mends what is broken, grows when it is shared, has a long memory
"""

# Words that belong together: `name(columns): row; row`. The first word of a row is {name}, the next {name.column}.
ROWS = """
thing(do, did, how): kite, fly, flew, high in the wind; ball, bounce, bounced, against the wall; drum, beat, beat,
  with two sticks; doll, dress, dressed, for tea parties; boat, sail, sailed, across the puddles; puzzle, solve,
  solved, piece by piece; book, read, read, under a blanket; teddy bear, hug, hugged, in bed; yo-yo, spin, spun, up
  and down; bucket, fill, filled, with sand; telescope, look through, looked through, on clear nights; bell, ring,
  rang, before dinner; flute, play, played, softly at night; trumpet, blow, blew, in the yard; scooter, ride, rode,
  around the block; wagon, pull, pulled, up the hill; shell, listen to, listened to, with closed eyes; crown, wear,
  wore, like a king; mask, paint, painted, with a funny face; wand, wave, waved, like a wizard; tent, sleep in, slept
  in, behind the fence; rocket, launch, launched, toward the moon; violin, practice, practiced, by the window;
  camera, take pictures with, took pictures with, in the park
place(at, spot, spot2, sight): forest, in, under a mossy log, behind the tallest oak, two owls in a hollow tree;
  beach, on, under the pier, behind a dune, white sails far out; park, in, under a bench, beside the swings, a brass
  band; farm, on, behind the barn, under the hay, piglets in the mud; market, at, behind the fish stall, under an
  awning, towers of oranges; library, in, between two shelves, under the stairs, maps of faraway islands; river, by,
  among the ferns, between the reeds, a heron on one leg; garden, in, behind the roses, under the pear tree, bees on
  the lavender; hill, on, behind a boulder, beside the sheep gate, the whole valley below; castle, at, behind a rusty
  gate, under the drawbridge, flags on every tower; harbor, at, behind the nets, under an upturned boat, a ship with
  three masts; cave, in, behind a dripping rock, beside a puddle, bats on the ceiling; museum, in, behind a suit of
  armor, under a glass case, the bones of a whale; zoo, at, near the ticket booth, beside the monkey house, giraffes
  with long necks; meadow, in, in the tall clover, beside a molehill, butterflies in the grass
job(shop, goods, do, did): baker, bakery, rolls, knead the dough, kneaded the dough; farmer, barn, potatoes, feed the
  hens, fed the hens; florist, flower shop, tulips, water the roses, watered the roses; grocer, corner store, pears,
  stack the boxes, stacked the boxes; cobbler, shoe shop, slippers, polish the boots, polished the boots; blacksmith,
  forge, horseshoes, fetch the coal, fetched the coal; tailor, tailor shop, trousers, sort the buttons, sorted the
  buttons; beekeeper, honey shed, candles, wash the jars, washed the jars; potter, pottery, mugs, carry the clay,
  carried the clay; clockmaker, clock shop, watches, wind the clocks, wound the clocks; gardener, greenhouse,
  seedlings, pull the weeds, pulled the weeds
beast(cried, moved, home, food): sparrow, chirped, fluttered, its nest, crumbs; mouse, squeaked, scurried, its hole,
  cheese; kitten, meowed, crept, a warm barn, milk; frog, croaked, hopped, the pond, flies; squirrel, chattered,
  dashed, a hollow tree, acorns; duckling, quacked, waddled, the reeds, seeds; owl, hooted, glided, an old tower,
  beetles; goat, bleated, climbed, a steep cliff, thistles; bat, peeped, flapped, a dark cave, moths; crow, cawed,
  flew, a tall pine, corn; goose, honked, marched, a farmyard, oats; robin, whistled, fluttered, the hedge, berries
skill(did, mishap, tip): ride a bike, rode a bike, fell into the bushes, look far ahead; swim, swam, swallowed a lot
  of water, kick with both legs; whistle, whistled, blew only air, make a tiny round mouth; skate, skated, landed on
  the ice, bend both knees; juggle, juggled, dropped every ball, start with only two; bake bread, baked bread, burned
  the crust, wait until it turns gold; row a boat, rowed a boat, went around in circles, pull both oars at once
project(of, ruin, fix): sandcastle, sand and shells, a big wave, a wall of stones; treehouse, boards and nails, a
  falling branch, thick ropes; snowman, snow and coal, the noon sun, a spot in the shade; raft, logs and string, a
  sharp rock, tighter knots; fort, sticks and blankets, a strong gust, wooden pegs; go-cart, crates and wheels, a
  deep hole, a better axle
fragile(broke): vase, cracked from top to bottom; teapot, lost its spout; plate, split in two; bowl, shattered on the
  floor; music box, stopped in the middle of its song; jug, leaked all over the shelf
dish(part): apple pie, flour; carrot soup, onions; honey cakes, eggs; pancakes, syrup; banana bread, sugar; berry
  jam, lemons; cheese pizza, tomatoes; noodle soup, parsley; chocolate cookies, butter; fruit salad, melons; rice
  pudding, raisins; vegetable stew, beans; mushroom pie, pepper; ginger biscuits, oats; corn muffins, milk
chore(did): rake the leaves, raked the leaves; sweep the porch, swept the porch; wash the windows, washed the
  windows; paint the gate, painted the gate; dry the dishes, dried the dishes; fold the laundry, folded the laundry;
  peel the onions, peeled the onions; mow the lawn, mowed the lawn
"""

# Words of the rules, each followed by others that a story may use in its place.
VOICE = """
happy, glad, joyful, delighted, pleased, cheerful at heart, proud, thrilled, overjoyed; sad, unhappy, gloomy,
  miserable, upset, heartbroken, downcast, tearful; scared, afraid, frightened, nervous, alarmed, terrified, uneasy,
  startled; said, called, cried, announced, whispered, declared, exclaimed, remarked, sang out, insisted; replied,
  answered, said, murmured, returned, explained, agreed, put in; asked, wondered, inquired, demanded, questioned,
  called; walked home, went home, made off, set out for home, turned for home, headed home, trotted home, rushed home;
  walked, ran, hurried, skipped, strolled, marched, raced, wandered, tiptoed, headed, dashed; laughed, giggled,
  grinned, chuckled, chortled, snickered, smirked; looked for, searched for, hunted for, hunted high and low for; saw,
  noticed, spotted, spied, discovered, caught sight of, made out; wanted to, hoped to, longed to, wished to, planned
  to, tried to, meant to, decided to; very, really, terribly, so, truly, ever so, awfully, rather; Suddenly, All at
  once, Without warning, At that moment, Just then, Out of nowhere, In a flash, Before long; At last, Finally, In the
  end, After a long time, In the long run, Many hours later, By and by, Late that day; Then, After that, Next, A
  moment later, Soon, Afterwards, Shortly after, Later on, A little later; But, Yet, Still, However, Alas; Wow, Oh my,
  Hooray, Goodness, Yippee, Bravo, Heavens, Hurrah; gave, handed, passed, offered, brought, lent, sold; loved, liked,
  enjoyed, adored, cherished, treasured, favored; together, side by side, as a team, hand in hand, with one another,
  as friends; nobody, no one; Nobody, No one; hugged, kissed, thanked; took, grabbed, seized, lifted, picked up,
  grasped, packed, carried off; looked at, stared at, gazed at, studied, watched, examined, peered at; thought of,
  remembered, pictured, imagined, missed, longed for; near, close to, not far from, beside, opposite, next to, across
  from; again, once more, anew; every, each, almost every, nearly every; because, since, as; although, even though;
  could not, couldn't, was unable to, failed to, no longer could, was too small to; did not, didn't; Do not, Don't,
  Never; I am, I'm; It is, It's; I will, I'll; road, street, lane, path, track, trail, alley, avenue; friend,
  companion, comrade, pal, buddy, playmate, mate; everything, all of it, the whole tale, every bit, what had happened,
  the lot; wonderful, splendid, marvelous, lovely, fantastic, amazing, delightful; smiled, nodded, beamed, blushed,
  winked, giggled, bowed, waved; found, discovered, came upon, dug up, spotted; alone, all alone, in silence, without
  company; worked, toiled, labored, hammered, sawed, went at it; met, ran into, bumped into, found, greeted; somebody,
  someone; a sack of, a bag of, a cart of; past, around, beyond, by, behind, along, all around; beside it, near it;
  for their help, as thanks, in return, for nothing, with a smile, for a song, for being kind; had forbidden it, had
  said no, had warned against it; fell apart, came down, collapsed, broke in two, tumbled down, cracked, gave way;
  came back, returned, turned up, came along, appeared, hurried over; told the truth, confessed everything, owned up,
  spoke up, explained it all, came clean; turned back, turned around; Together, Side by side, With four hands, Hand in
  hand, As a team, Bit by bit, With new hope; never forgot, always remembered, learned, noted in a diary, told
  everybody, often repeated; dreamed of, wished for; blocked the way, did not let them pass, would not budge, barred
  the way, would not move, refused to go; got across, crossed the water, climbed over, made it over, reached the far
  side, swam over; until, till; wore, had on; had to, needed to, was asked to, hurried to, agreed to, was ready to;
  tried it, practiced it, had a go at it; The next, The following, Another; had known, had felt, had believed, had
  said, had learned, had written; From then on, Ever since, After that; stayed, remained, was, grew, seemed; if you,
  as soon as you, once you, when you, in case you, provided that you, the day you; So they, Gladly they, At once they,
  In no time they, With a laugh they, At that they, And so they; reached, came to, stopped at, found, arrived at; It
  ended, It led them, It stopped; hurt, twisted, bumped; knew that, was sure that, felt that, agreed that, saw that,
  believed that; some, a bit of, a piece of, plenty of, a little, enough, a lot of; only, just, simply; look for,
  watch out for, ask for; Please, Oh please, Kindly, If you please, You must; as before, as ever; sang, hummed,
  whistled, chanted, shouted; helped, aided; sat down, lay down, knelt, curled up, crouched, sank down, flopped down;
  cried, sobbed, wept, moaned, sniffed, shed a tear, whimpered; sighed, groaned, yawned, mumbled, frowned, pouted;
  trembled, shook, felt weak, shivered, quivered, wobbled; mended, repaired, fixed, patched, glued, restored,
  stitched; lay in, stood in, was shown in, gleamed in, hung in; pockets held, purse held, piggy bank held, bag held,
  drawer held; came to watch, turned up, came along; stood, could be seen; an old map, a torn map, a rolled-up map,
  half a map, a faded map; was drawn, was marked, shone, was painted, was hidden; they dug, they scraped, they poked
  about, they shoveled, they searched; they found, they unearthed, they had, up came, out came; was broken, was
  closed, was blocked, was shut, was missing; likes to say, always says, often says, used to say, keeps saying; Look
  for, Ask for, Watch out for, Wave to; somebody new, a stranger, a newcomer, a new face, a new neighbor;
  Nobody played, No one played, Few played, Nobody ever shared, Hardly anyone played; smelled of, was full of the
  smell of, filled with the smell of, was warm with, smelled sweetly of; What is wrong, What is it, What is the
  matter, Who did this, Why that face; Can I help, Can I do something for, May I sit with, Shall I stay with, Do I
  bother; I am scared, I don't like this, Let us run, My heart is racing, Hold my hand
"""
# `name: form | form`; a form may begin a line with its bar.
RULES = """
story: <opening> // <plot> // <closing>
surname: <first>[by|dale|field|ford|ley|man|son|stone|ton|well|worth]
hour: one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve
town: [|Old |New |Upper |Little ]<first> {last}
landmark: the <surname> [windmill|church|clock tower|water tower|oak tree|post
  office|well|bandstand|statue|signpost|fountain|fire station|bridge|market hall|pine|chapel|lighthouse|stable]
spot: [|just |right |somewhere |half hidden ][{place.spot}|{place.spot2}] | {place.at} the <look_of_place> {place} |
  near {landmark}
spot2: [|just |right |somewhere |half hidden ][{place2.spot}|{place2.spot2}] | {place2.at} the <look_of_place>
  {place2}
look_of_place: quiet | old | big | lovely | busy | green | lonely | wide | sunny | shady | distant | crowded | empty
  | famous
food: <taste> {dish}
gesture: [scratched|rubbed|tapped|touched|pinched] {his} [nose|chin|forehead|elbow|left ear|right ear|left
  knee|neck]
| [hummed a tune|hopped up and down|gazed at the sky|crossed {his} arms|blinked twice|stood on tiptoe|bit {his} lip]
hero: {hero} | {hero} {surname} | {trait} {hero} {surname} | the {trait} {kind} | {trait} {hero} | the {look} {kind}
  | the {kind} in the <wear>
pal: {pal} | {pal} {surname2} | {trait2} {pal} {surname2} | the {trait2} {pal.kind} | {trait2} {pal} | the {look2}
  {pal.kind} | {his} friend {pal}
elder: {elder} | {elder_look} {elder}
elder_look: wise | strict | jolly | patient | kind | funny | dear | busy | cheerful | tired | clever | gentle
helper: {helper} | the {job} | {helper} the {job}
toy: {color} {thing} | {shape} {thing} | {shape} {color} {thing}
gift: {color2} {thing2} | {shape2} {thing2} | {shape2} {color2} {thing2}
wear: {garment} | {color3} {garment} | {cloth} {garment} | {color3} {cloth} {garment}
home: {hut} | {hut_look} {hut} | {color4} {hut} | {hut_look} {color4} {hut}
any_beast: <shape> <critter> | <color> <critter> | <look> <critter>
any_thing: <shape> <trinket> | <color> <trinket> | <color> <cloth> <garment>
any_food: <taste> <snack> | <taste> <dish row> | <snack>
hero_said: said <hero> | said <hero>[ <how>| in a {voice} voice| and {gesture}]
pal_said: replied <pal> | replied <pal>[ <how>| in a {voice2} voice| with a [smile|nod|sigh|wink]]
elder_said: replied <elder> | replied <elder>[ <how>| in a {voice3} voice| after a while]
opening: <who> <habit>
| <who> <owns>
| <who> <wears>
| <who> <owns> <habit>
| <who> <wears> <owns>
| <who> <wears> <habit>
who: [Once upon a time|Once|Long ago|Many years ago|Not so long ago] there [was|lived] a {trait} {look} {kind}
  [named|called] {hero} {surname}. {He} [lived with {elder_full}|and {elder_full} lived] in a {hut_look} {color4}
  {hut} near {landmark}[ in {town}|].
| In {town}, near {landmark}, [stood|was] a {hut_look} {color4} {hut}. A {trait} {look} {kind} [named|called] {hero}
  {surname} lived there <how> with {elder_full}.
| {hero} {surname} was a {trait} {look} {kind} from {town}. {He} [shared a {hut_look} {color4} {hut}|had a
  {hut_look} room] with {elder_full}, [right behind|just across from|in sight of] {landmark}.
| [This is the|Let me tell you the|Everybody knows the] story of {hero}, a {trait} {look} {kind} who lived with
  {elder_full} in {town}. Their {hut_look} {color4} {hut} [stood|was] near {landmark}.
habit: [When|Whenever] {he} was [thinking|bored|hungry|tired|excited], {he} {gesture} or [watched|drew|dreamed
  of|whistled like] a {any_beast}.
| Most of all {he} loved {food}, {game}, {any_food} and {weather} [days|walks|hours] {place.at} the {place}.
| {helper}, who sold {job.goods} and <any_food> at the {job.shop}, [liked {him}|often gave {him} a <any_thing>].
owns: {elder} had [given|made|bought|lent|sent] {him} a {shape} {color} {thing}, which {he} {thing.did} {thing.how}
  every {weather} [{day}|{time}].
wears: {He} [always|often|mostly|<how>] wore a {color3} {cloth} {garment}, which {elder} had
  [mended|sewn|dyed|bought on a {day2}|swapped for a {any_thing}].
when: One {weather} {day},
| On a {weather} {time},
| Early one {weather} {time},
| One {weather} {day} {time},
| One {day} at <hour> o'clock,
meet: [Near {landmark}|Outside the {job.shop}] {he} met {pal}, a {trait2} {look2} {pal.kind} [in|with] a
  {any_thing}.
| A {trait2} {look2} {pal.kind} named {pal} [sat|stood|sang|slept|read] <how> <spot>.
| {pal}, a {trait2} {look2} {pal.kind}, came [by|out of the {job.shop}|down the road] with [{job.goods}|a
  {any_thing}|a {any_beast}].
| {His} [best|oldest|good|dear] friend {pal}, a {trait2} {look2} {pal.kind}, [played {game}|was eating {any_food}]
  <spot>.
sigh: <hero> was very sad and [{gesture}|wished for {number} new ones|told it to a {any_beast}|thought of {elder}
  and {any_food}].
| <hero> sat down <spot> and [cried|sighed|pulled {his} <wear> over {his} eyes|looked at a {any_beast}].
| "[Oh no|Oh dear|What a pity|How awful]!" <hero_said>. "[I wonder what {elder} will say|I do not like this {day}|I
  feel like a wet {beast4}]."
joy: <hero> was very happy and [{gesture}|hugged <pal>|gave <pal> a {any_thing}|danced around {landmark}].
| "Wow!" <hero_said>. "[What a {weather} {day}|This is wonderful|I must tell {elder}|Let us eat {any_food}]!"
| Nobody in {town} was as happy as <hero>[ and <pal>|, not even the {beast4} <spot>].
fright: {His} knees trembled, and {he} [held on to|hid behind|pulled at] {his} <wear>.
| "I am scared," <hero_said>. "[It looks like|It sounds like|I would rather meet] a {any_beast}."
| <hero> was very scared, and {he} thought of [{elder}|{any_food}|the <home>|{his} <wear>].
help: "[What is wrong|What happened|Why are you so sad], {hero}?" asked <pal>. <hero> [told|confided to] {pal.him}
  everything [<how>|over {any_food}].
| <pal> saw {his} [face|tears|<wear>] and gave {him} [{any_food}|a {any_thing}]. "[Can I help you|May I help]?"
  asked {pal}.
| "Do not be sad, {hero}. [We will find a way|You have me|I have a {any_thing}|Eat some {any_food} first],"
  <pal_said>.
freed: With {number} [ropes|tools|pulls] they set the {beast} free <how>.
| {pal} <how> held the <tool>, and {hero} pulled the {beast} out.
| They [pushed|dug|pulled] <how> with a <tool> and {his} <wear>, and after {number} tries the {beast} was free.
| <hero> [turned|lifted|bent] the <tool> {number} times, and the {beast} slipped out <how>.
left: It ate [{beast.food}|<any_food>] and {beast.moved} [back to {beast.home}|away <how>].
| It {beast.cried} {number2} times and {beast.moved} <how> [|back ]to {beast.home}.
| It looked at {his} <wear>, {beast.cried} and {beast.moved} [away|past {landmark}|back to {beast.home}] <how>.
learned: From that day on <hero> knew that
| And so <hero> [learned|understood] <how> that
| <hero> never forgot that
| {elder} had known since {day3}, and now <hero> <how> understood that
| <pal> and <hero> told [{town}|<elder>|<helper>] that
closing: <night> <after> | <night> | <after> | <night> <proverb> | <proverb> <after>
night: That [night|evening] {hero} told <elder> [everything|all about {pal}|the whole story] over {any_food} and
  <any_food>.
| At <hour> o'clock <elder> <how> [made|served|cooked] {food}, and they played {game2} until {number2} stars shone
  over {landmark}.
| That {weather} night the {color5} moon rose over {landmark}, and <hero> dreamed of [a {any_beast}|a
  {any_thing}|{any_food}].
| When the {weather} {time} was over, <pal> walked home past {landmark}, and <hero> waved {his} <wear> <how> until
  {pal.he} was gone.
proverb: "{virtue} {deed}," <elder_said>, and <hero> [{gesture}|ate {number2} plates of {any_food}].
| As <helper> likes to say [at the {job.shop}|in {town}|over {any_food}]: {virtue} {deed}.
after: From then on <hero> and <pal> [came together <spot>|played {game2}|shared {any_food}] every {weather}
  [{day2}|{time}].
| [Do you know|Have you been to|Will you ever visit] {town}? Look for a {look} {kind} with a {any_thing} [near
  {landmark}|<spot>].
| <hero> and <pal> [laughed about it|stayed friends|talked about it] for {number2} [weeks|months|years].
| <hero> stayed as {trait} as before, and <pal> just as {trait2}. [The end|That is the whole story|And that is all].
plot: <when> {hero} looked for {his} <toy> [in every drawer|under the bed] and <spot>, but {he} only found a
  <any_thing> and {number} <any_thing>s. <sigh> // <meet> <help> "[A {beast}|Somebody] took something {color} to the
  {place2}." <journey> // <spot2> slept a <any_beast>, with the {thing} beside it. It had [been alone|felt
  cold|wanted a friend]. {hero} gave it [<any_food>|a <any_thing>] and got back the <toy>. <joy> <learned> [a
  friend|a kind word|a warm heart] is [worth more than|better than|not as rare as] any {thing}.
| <when> something {beast.cried} <spot> while <hero> {thing.did} {his} <toy>. It was a {color5} {beast}[, and it was
  {trap}|, {trap}| with a <any_thing>, and it was {trap}]! <fright> // <meet> <help> "We need the <tool> of
  {helper}." <journey> // <freed> <left> [{number2} days later|On {day3}|One {weather} {time2}] {hero} lost {his}
  {garment}, and [the {color5} {beast}|a {beast} with a <any_thing>] found it <spot>! <joy> <learned>
  [good|kind|small|brave] deeds [come back|travel far|have long legs|make friends].
| <when> <hero> found an old map <spot>. A <color> [cross|star|arrow|circle] was drawn {place2.at} the
  <look_of_place> {place2}. <meet> "[A treasure|Let us take {food} and go|I will bring my <any_thing>]!" <pal_said>.
  <journey> // <spot2> they dug with a <tool>, and after {number} [minutes|hours] they found {treasure} and a
  <any_thing>! <helper> [laughed|gave them a <tool>|bought {number2} of them for <any_food>]. <joy> <learned> [the
  way|good company|a brave friend|a {weather} {time}] [is half|is the best part of|is worth more than]
  [the|every|any] treasure.
| <elder> was [sick in bed|very tired|sad] and [wished for|dreamed of] {food}, but they had only a <any_thing> and
  no {dish.part}. "I will get some at the {job.shop} <how>," <hero_said>. <meet> <help> <journey> // "You may have
  {dish.part} and a <any_thing> if you {job.do}," replied <helper>. So they {job.did} [<how>|for {number2}
  minutes|with a <tool>] and walked home[ <how>|]. Soon the <home> smelled of {food}[| and <any_food>]. "[Nobody in
  {town} cooks like you|This is better than <any_food>]," <elder_said>. <joy> <learned> [love|care|kindness] is [the
  best|the rarest|the sweetest] [spice|medicine|meal].
| "Do not go far from {landmark}," <elder_said>. But <hero> saw a {color5} {beast} with a <any_thing> and walked
  after it, [over a fence|past the {job.shop}]. Suddenly it {beast.moved} away <how>, and {he} was alone <spot>.
  <fright> // <meet> <help> "I know the <color> road to {landmark}." <journey> // {elder} was there with <any_food>.
  "I looked for you for {number} hours and woke {number2} {job3}s!" said {elder} and hugged {him} <how>. <joy>
  <learned> [it is wise to listen|home is never far|good advice costs nothing] [when you have a friend|on a
  {weather} {day}|in {town}].
| <when> <hero> played {game} in the <home>, although <elder> had forbidden it. Crash! The {shape2} {color2}
  {fragile} {fragile.broke}. <fright> [{He} hid the pieces [under {his} <wear>|<how> <spot>|behind a
  <any_thing>].|"It was a <any_beast>," {he} told {elder}.] // <meet> <help> "[I broke a <color> {fragile2} on
  {day2}|A lie grows like a <any_beast>]," <pal_said>. // So <hero> told the truth <how>. "[It is only a {color2}
  {fragile}|I am glad that you told me]," <elder_said>. [Together they mended it with {number} strips of a <cloth>
  <garment>.|To make up for it {hero} [<how> |]{chore.did} and [<how> |]{chore2.did} [on {day3}|for {number2}
  days|every {weather} {time}].] <learned> [the truth|an honest word] [hurts only once|is a good friend|weighs less
  than a lie|makes a {time} lighter].
| A {shape2} {color2} {thing2} lay in the window of the {job.shop}. <hero> wanted to {thing2.do} it {thing2.how},
  but {his} pockets held only a <any_thing>[| and {number2} <any_thing>s]. "Please {job.do} for {number} {weather}
  days," replied <helper>. // So {hero} {job.did} <how>, {chore.did} for <any_food> and {chore2.did} for {number2}
  coins. <meet> ["Come and play {game}," <pal_said>, but <hero> worked on.|<pal> helped {him} <how> and brought
  <any_food>.] At last <helper> gave {him} the <gift>. // [{hero} {thing2.did} it {thing2.how}.|But {pal} had lost
  {pal.his} own {thing2}, and so {hero} gave {pal.him} the new one.] <joy> <learned> [patience|work|waiting] [fills
  empty pockets|tastes sweet in the end|is worth {number2} wishes].
| <hero> wanted to {skill} like [<elder>|<helper>|a <any_beast>]. <when> {he} tried it <spot>, but {he}
  {skill.mishap}. [The next {time} {he} {skill.mishap} again|{He} tried it {number2} times <how> and {skill.mishap}
  every time|On {day2} it was no better: {he} {skill.mishap}], [and a <any_beast> {beast.cried}|and <elder> brought
  <any_food>|although {he} wore {his} <wear>]. <sigh> // <meet> <help> "You must {skill.tip}," <pal_said>. {hero}
  tried it {number} times more, with {his} <wear> on. // On {day3} [all of {town}|<elder>|<helper>] came to watch
  with <any_food>. "{Skill.tip}," thought <hero>. And {he} {skill.did}! <joy> <learned> [falling|failing|trying] is
  [a part|the secret|the price|the better half] of [learning|every skill|success].
| <meet> <when> {pal} wanted to {thing.do} the <toy> of {hero}. "[No, it is mine|You will break it|Take a
  <any_thing>]," <hero_said>. <pal> took {pal.his} <any_thing> and walked home. <hero> {thing.did} the <toy> alone
  {thing.how}. // <sigh> "A {thing} cannot eat <any_food> with you," <elder_said>. <hero> thought about it for
  {number} hours. // On {day2} {he} walked to {pal} with [<any_food>|a <any_thing>]. "[I am sorry|I was wrong],"
  <hero_said>. "Let us {thing.do} it together." <pal> smiled <how>. <joy> <learned> [half a {thing}|one {thing} for
  two|a {thing} and a friend] [is better than a whole one alone|lasts twice as long|is more fun than {number2}
  {thing}s].
| <when> <hero> wanted to build a {project} <spot>. {He} took a <any_thing> and {project.of} and worked <how>.
  <meet> "[May I help you|What is it going to be|Will it hold a <any_beast>]?" asked {pal}. "[I need no help|I am
  busy|Wait and see]," <hero_said>. // By <hour> o'clock it was [done|the pride of {town}|as high as a <any_beast>].
  But [on {day2}|after {number2} minutes|while <hero> ate <any_food>] came {project.ruin}, and the <shape> {project}
  fell apart[| <how>]. <sigh> // <pal> came back with a <tool> and <any_food>. "It needs {project.fix}," <pal_said>.
  Together they built it again[ <how>|], with [{project.fix} and |]a <any_thing> on top. <joy> <learned>
  [two|friends|four hands] [build|climb|dream] higher than [one|pride|a {beast4}].
| <when> <hero> helped a {color5} {beast} that was {trap} <spot>. "[I am a magic {beast}, and you have {number}
  wishes|You may wish for {number} things|For {beast.food} I grant {number} wishes]," it {beast.cried} <how>. "I
  wish for {number2} <any_thing>s and <any_food>!" <hero_said>. [Zap|Poof|Whoosh]! // But soon [there was no room
  for {elder}|{he} could not find {his} <toy>|the <home> began to creak]. <meet> "[I liked it better before|I cannot
  find my <any_thing> here]," <pal_said>. <sigh> // "Please, {beast}, take it all back," <hero_said>. The {color5}
  {beast} {beast.moved} <how> back to {beast.home}, and <hero> {thing.did} {his} <toy> {thing.how} with <pal>.
  <learned> [enough|one {thing}|a quiet {time}] is [as good as|better than|richer than] [a feast|a wish|{number2}
  wishes].
| There was somebody new <spot>: {pal}, a {trait2} {look2} {pal.kind} with a {color6} {thing3}. [Nobody played
  {game} with {pal.him}|They laughed at {pal.his} <any_thing>], and {pal.he} {thing3.did} the {thing3} alone. //
  <when> {hero} [put on {his} <wear>|{gesture}|took {his} <toy>] and walked over <how>. "[Do you want to play
  {game}|Will you show me your {thing3}|May I have a look at your <any_thing>]?" asked <hero>. {pal} smiled <how>.
  "[I would love that|My old friends are {number} miles away]," <pal_said>. // <hero> showed {pal.him} {landmark},
  the {job.shop} of {helper} and {place.sight}. Then they {thing.did} the <toy> {thing.how}. <joy> <learned> [one
  kind word|an open door|a shared <thing row>] can [change a {day}|make a friend|warm a {weather} {time}].
journey: {stage} // {stage2}
stage: The <shape> bridge was [gone|broken|under water]. But {pal} had a <tool> and a <any_thing>, and they got
  across <how>.
| A <any_beast> with a <any_thing> sat in the road and blocked the way. They gave it <any_food> and
  [{hero}'s|{pal}'s] <any_thing>.
| [Fog came|Night fell|It began to snow|The moon hid], and they [held on to {his} <wear>|sang {number2}
  songs|counted {number2} steps|followed a <any_beast>], until they <how> saw a <color> <trinket> {place3.at} the
  <look_of_place> {place3}.
| They reached a <shape> <color> gate. "I will open it if you [{job3.do}|bring me {number2} <any_thing>s|guess the
  name of my <any_beast>]," replied a <look> {job3} with a <any_thing>. So they did it <how>.
| Then <pal> hurt {pal.his} foot {place3.spot}. <hero> [tied {his} <wear> around it|gave {pal.him}
  <any_food>|carried {pal.him} <how>].
| "Left or right?" asked {pal}. {hero} {gesture} and [<how> |]chose the <color> road[| with the <any_thing>]. It
  ended [<how> |]{place3.spot2}, so they walked back {number2} miles[| with a <any_thing>].
| They met a <elder_look> {job3} with a sack of {job3.goods}, and got a <any_thing> and <any_food> for their help.
| Something {beast2.cried} behind a <any_thing>. <fright> But the <look> <color> {beast2} only wanted a <any_thing>
  and {beast2.food}.
| "[First|Now|Today] play {game2} with me," replied a <look> {job3} {place3.at} the <look_of_place> {place3}. They
  won {number2} <any_thing>s.
"""

_Rule = list[list[Any]]  # alternatives, each a list of texts and rules
_TOKEN = re.compile(r"( \| |[\[\]|]|<[\w ]+>|\{[\w. ]+\})")


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and body of every `name: body`; a body goes on in lines that are indented or begin with a bar."""
    for section in re.split(r"\n(?=\w)", text.strip()):
        name, _, body = section.partition(":")
        yield name, re.sub(r"\s+", " ", re.sub(r"(?<! )\|\n +", "|", body)).strip()


def _parse(text: str, rules: dict[str, _Rule]) -> _Rule:
    """Return the alternatives of a rule. A fact becomes a %-format: it is filled in when the text is complete."""
    stack: list[_Rule] = [[[]]]  # the open brackets, each with its alternatives so far
    for token in _TOKEN.split(text):
        if token == "[":
            stack.append([[]])
        elif token == "]":
            closed = stack.pop()
            stack[-1][-1].append(closed)
        elif token in ("|", " | "):
            stack[-1].append([])
        elif token.startswith("<"):
            stack[-1][-1].append(rules[token[1:-1]])
        else:
            stack[-1][-1].append(f"%({token[1:-1]})s" if token.startswith("{") else token)
    assert len(stack) == 1, f"a bracket is open in {text!r}"
    return stack[0]


def _read_grammar() -> tuple[dict[str, _Rule], dict[str, dict[str, dict[str, str]]]]:
    """Return the rules by name, and the rows by name and first word."""
    rules: dict[str, _Rule] = defaultdict(list)
    rows = {}
    voices = [entry.split(", ") for entry in " ".join(VOICE.split()).split("; ")]
    longest_first = sorted((word for word, *_ in voices), key=len, reverse=True)
    voiced = re.compile(rf"(?<![{{.<])\b({'|'.join(longest_first)})\b")  # not in {beast.cried}
    for name, body in _sections(RULES):
        rules[name] += _parse(voiced.sub(r"{\1}", body), rules)
    for name, body in _sections(WORDS):
        rules[name] += [[word] for word in re.split(", " if "," in body else " ", body)]
    for words in voices:
        rules[words[0]] += [[word] for word in words]
    for heading, body in _sections(ROWS):
        name, *columns = re.findall(r"\w+", heading)
        keys = ["", *(f".{column}" for column in columns)]
        table = [row.split(", ") for row in body.split("; ")]
        rows[name] = {row[0]: dict(zip(keys, row, strict=True)) for row in table}
        rules[f"{name} row"] += [[word] for word in rows[name]]
    return rules, rows


_RULES, _ROWS = _read_grammar()
_SPEECH = "|".join(["thought", *(word for key in ("said", "replied", "asked") for (word,) in _RULES[key])])
# The letter that begins a sentence. After "Look!" and the like the sentence may go on: "Look!" said Tom.
_SENTENCE_START = re.compile(rf'(?:^|\n\n|[.!?]"? )"?(?!(?:{_SPEECH})\b)[a-z]')


class _Story(dict[str, str]):
    """The facts of one story by name; a fact that is missing is drawn."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._taken: set[str] = set()
        # A pronoun says who of the two is meant.
        genders = ("girl", "boy") if draw() < 0.5 else ("boy", "girl")
        for role, gender in zip(("hero", "pal"), genders, strict=True):
            is_animal = draw() < 0.3
            self._add_person(role, self._another("pet" if is_animal else gender), gender)
            self[f"{role}.kind"] = self._another("species") if is_animal else gender
        self.update({name: self[f"hero.{name}"] for name in ("kind", "he", "him", "his")})
        gender = "girl" if draw() < 0.5 else "boy"
        title, look = self._another(f"{gender}_elder"), self["elder_look"]
        is_parent = title in ("Mom", "Dad")
        self._add_person("elder", title if is_parent else f"{title} {self._another(gender)}", gender)
        self["elder_full"] = (
            f"{self['his']} {look} {title.lower()}" if is_parent else f"{look} {self['elder']}"
        )
        gender = "girl" if draw() < 0.5 else "boy"
        self._add_person("helper", f"{self._another(f'{gender}_title')} {self._another('surname')}", gender)

    def _add_person(self, role: str, name: str, gender: str) -> None:
        self[role] = name
        self.update({f"{role}.{pronoun}": word for pronoun, word in _PRONOUNS[gender].items()})

    def __missing__(self, name: str) -> str:
        if name[0].isupper() and name not in _RULES:
            value = self[name[0].lower() + name[1:]]
            return value[0].upper() + value[1:]
        owner = name.partition(".")[0]
        kind = owner.rstrip("0123456789")
        if kind in _ROWS:
            row = _ROWS[kind][self._another(f"{kind} row")]
            self.update({owner + column: word for column, word in row.items()})
        else:
            self[owner] = self._another(kind)
        return self[name]

    def _another(self, kind: str) -> str:
        """Return a form of a rule that no other fact of the story has; of a rule of one form, another text."""
        rule = _RULES[kind]
        while True:
            index = int(self._draw() * len(rule))
            text = self.expand([rule[index]])
            key = f"{kind} {index}" if len(rule) > 1 else text
            if key not in self._taken:
                self._taken.add(key)
                return text

    def expand(self, rule: _Rule) -> str:
        """Return a rule as text."""
        pieces: list[str] = []
        self._write(rule, pieces.append)
        return "".join(pieces) % self

    def _write(self, rule: _Rule, write: Callable[[str], None]) -> None:
        for piece in rule[int(self._draw() * len(rule))]:
            if isinstance(piece, str):
                write(piece)
            else:
                self._write(piece, write)


def generate_stories(seed: int) -> Iterator[str]:
    """Yield stories without end, each closed by a line break.

    Python promises to keep the numbers of `random.Random.random` for a seed: everything is drawn with it.
    """
    draw = random.Random(seed).random
    while True:
        text = _Story(draw).expand(_RULES["story"]).replace(" // ", "\n\n")
        text = _BEFORE_VOWEL.sub("n ", text)
        yield _SENTENCE_START.sub(lambda start: start[0].upper(), text) + "\n"


def write_stories(
    path: str | os.PathLike[str],
    *,
    size_mb: float,
    seed: int,
    end: str = END_OF_TEXT,
    force: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write stories until the file holds at least `size_mb` * 10^6 bytes, each followed by `end`.

        >>> write_stories("stories.txt", size_mb=20, seed=0)  # doctest: +SKIP

    The last story is whole. A longer corpus of the same seed begins with the shorter one. Memory does not depend on
    the size. The stories are ASCII; the file appears when it is complete.

    Args:
        force: replace a file that exists.
        progress: called with ("stories", bytes written, bytes wanted).

    Raises:
        UsageError: `size_mb` is not a finite positive number ("synth.size"), or is more than the disk has
            free ("output.too_large"); the file exists ("output.exists").
    """
    if not 0 < size_mb < math.inf:
        raise UsageError("synth.size", f"size_mb: {size_mb} is not a size", hint="for example --size-mb 20")
    refuse_existing(Path(path), force=force)
    refuse_too_large(Path(path), size_mb * 1e6)
    wanted = int(size_mb * 1_000_000)
    written = reported = 0
    with atomic_path(path) as partial, open(partial, "w", encoding="utf-8", newline="") as file:
        for story in generate_stories(seed):
            written += file.write(story) + file.write(end)
            if progress is not None and (written >= reported + _PROGRESS_EVERY or written >= wanted):
                progress("stories", min(written, wanted), wanted)
                reported = written
            if written >= wanted:
                break


# Lists of words, separated by commas if one of them has a space.
