"""The words of generated stories; `synth.py` has the grammar that puts them together."""

# Lists of words, separated by commas if one of them has a space.
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
