"""What there is, and what one does with it: toys, food, chores, skills, fears, things to build and to break.

A row's columns belong together, so that a kite is flown and a drum is beaten. Knowing the noun, a reader can tell the
verb; the word before it cannot.
"""

from lmkit.data.stories.tables import phrase_list, table, word_list

# noun, what one does with it, the same in the past, how
THINGS = table("""
kite, fly, flew, high in the wind
ball, bounce, bounced, against the wall
drum, beat, beat, with two sticks
doll, dress, dressed, for tea parties
whistle, blow, blew, as loud as a train
boat, sail, sailed, across the puddles
truck, push, pushed, over the rug
train, drive, drove, around the table
puzzle, solve, solved, piece by piece
book, read, read, under a blanket
crayon, draw with, drew with, all over the paper
teddy bear, hug, hugged, in bed
yo-yo, spin, spun, up and down
balloon, float, floated, above the chairs
bucket, fill, filled, with sand
shovel, dig with, dug with, in the dirt
lantern, light, lit, after dark
telescope, look through, looked through, at the stars
camera, take pictures with, took pictures with, of the clouds
parasol, open, opened, in the rain
bell, ring, rang, before dinner
flute, play, played, softly at night
guitar, play, played, for the neighbors
trumpet, blow, blew, in the yard
marble, roll, rolled, down the hall
coin, flip, flipped, in the air
magnet, pick up nails with, picked up nails with, in the shed
robot, push, pushed, over the floor
puppet, move, moved, behind a curtain
scooter, ride, rode, down the street
bike, ride, rode, around the block
wagon, pull, pulled, up the road
sled, ride, rode, down the slope
rope, jump over, jumped over, in the yard
hoop, roll, rolled, along the path
jar, fill, filled, with buttons
box, open, opened, with a tiny key
key, hang, hung, on a string
mirror, look into, looked into, every day
brush, paint with, painted with, on the fence
pencil, write with, wrote with, at the desk
stamp, print, printed, on every letter
feather, tickle people with, tickled people with, for fun
shell, listen to, listened to, for the sound of the sea
stone, skip, skipped, over the water
seashell, hold, held, close to one ear
pillow, throw, threw, across the room
blanket, wrap up in, wrapped up in, on cold nights
basket, carry, carried, to the market
lamp, light, lit, before bed
clock, wind, wound, every night
watch, wear, wore, to every party
necklace, wear, wore, on Sundays
ring, wear, wore, on one finger
crown, wear, wore, like a king
mask, paint, painted, with a funny face
wand, wave, waved, like a wizard
sword, swing, swung, at the weeds
shield, raise, raised, against the wind
flag, wave, waved, from the roof
map, unroll, unrolled, on the carpet
compass, follow, followed, to the north
notebook, write in, wrote in, every night
top, spin, spun, on the table
card, read, read, again and again
racket, swing, swung, at the ball
net, catch bugs with, caught bugs with, in the grass
fishing rod, hold, held, over the river
tent, sleep in, slept in, behind the house
rocket, launch, launched, toward the moon
plane, throw, threw, over the hedge
helicopter, fly, flew, around the lamp
dinosaur, stomp around with, stomped around with, on the bed
bow, shoot, shot, at a tree
skateboard, ride, rode, down the ramp
swing, sit on, sat on, in the shade
fan, wave, waved, on hot days
piano, play, played, before breakfast
violin, practice, practiced, near the window
harp, play, played, like an angel
horn, blow, blew, at noon
bottle, fill, filled, with lemonade
mug, drink from, drank from, at breakfast
spoon, stir with, stirred with, in every pot
toolbox, open, opened, to fix things
hammer, swing, swung, in the shed
ladder, climb, climbed, to the roof
wheel, turn, turned, with one hand
candle, light, lit, at dinner
photo, look at, looked at, with a smile
""")

# food, three things it is made of
FOODS = table("""
apple pie, apples, flour, cinnamon
carrot soup, carrots, onions, cream
honey cakes, honey, eggs, butter
pancakes, eggs, milk, syrup
banana bread, bananas, sugar, flour
berry jam, berries, lemons, sugar
pumpkin soup, pumpkin, salt, garlic
cheese pizza, dough, tomatoes, cheese
noodle soup, noodles, chicken, parsley
chocolate cookies, chocolate, butter, flour
fruit salad, melons, grapes, cherries
corn bread, corn, milk, eggs
rice pudding, rice, raisins, vanilla
vegetable stew, potatoes, beans, peppers
lemon tarts, lemons, cream, sugar
potato salad, potatoes, pickles, mustard
mushroom pie, mushrooms, cheese, pepper
ginger biscuits, ginger, honey, flour
peach cobbler, peaches, oats, butter
hot chocolate, chocolate, milk, marshmallows
tomato sauce, tomatoes, garlic, basil
plum dumplings, plums, dough, cinnamon
""")

# task, the same in the past
CHORES = table("""
rake the leaves, raked the leaves
sweep the porch, swept the porch
wash the windows, washed the windows
carry the firewood, carried the firewood
walk the dog, walked the dog
paint the gate, painted the gate
pull the weeds, pulled the weeds
set the table, set the table
dry the dishes, dried the dishes
pick the cherries, picked the cherries
feed the chickens, fed the chickens
fold the laundry, folded the laundry
brush the horse, brushed the horse
shovel the snow, shoveled the snow
water the beans, watered the beans
clean the stove, cleaned the stove
stack the bricks, stacked the bricks
peel the potatoes, peeled the potatoes
mop the floor, mopped the floor
hang the curtains, hung the curtains
beat the rugs, beat the rugs
mow the lawn, mowed the lawn
""")

# skill, the same in the past, what goes wrong, the advice
SKILLS = table("""
ride a bike, rode the bike, fell into the bushes, look far ahead
swim, swam, swallowed a mouthful of water, kick with both legs
whistle, whistled, only blew air, make a tiny round mouth
tie a bow, tied a bow, ended up with a knot, make two bunny ears
climb the oak tree, climbed the oak tree, slid back down, keep three limbs on the bark
skate, skated, landed on the ice, bend both knees
juggle, juggled, dropped every ball, start with only two
paint a horse, painted a horse, painted a potato with legs, begin with circles
play the flute, played the flute, made a terrible squeak, blow very softly
catch a ball, caught the ball, missed it by a mile, watch it all the way
dance, danced, tripped over a chair, count the beat out loud
write a poem, wrote a poem, tore up the page, listen to the sounds outside
bake bread, baked bread, burned the crust, wait until it turns gold
row a boat, rowed the boat, went around in circles, pull both oars together
jump rope, jumped rope, got tangled up, listen for the tap
read a long book, read the long book, forgot the first page, go one line at a time
sing high notes, sang the high notes, sounded like a rusty gate, breathe from the belly
build a fire, built a fire, made nothing but smoke, use the driest twigs
""")

# what is feared, why, what helps, what it turns out to be
FEARS = table("""
the dark, there were shapes in every corner, a small night lamp, only coats on a chair
thunder, it shook the whole roof, a slow count to ten, only clouds that clap
deep water, nobody could see the bottom, a ring of cork, soft sand and tiny fish
the big dog next door, it had such long teeth, a piece of bread, a gentle old dog
the attic stairs, they creaked like a ghost, a happy song, only dry old wood
high places, everything looked so small, a firm hand, a lovely view
the doctor, the needle looked so sharp, a deep breath, only a quick pinch
spiders, they had too many legs, a magnifying glass, a tiny weaver at work
the first day of school, all the faces were new, a lucky button, a room full of friends
the well, a voice answered from below, a merry shout, only an echo
bees, they made an angry sound, a slow walk, busy workers in fuzzy coats
the scarecrow, it waved its arms, a wave back, only straw in a shirt
""")

# what is built, of what, what ruins it, what makes it strong
BUILDINGS = table("""
sandcastle, sand and shells, a big wave, a wall of stones
treehouse, boards and nails, a heavy branch, thick ropes
snowman, snow and coal, the noon sun, a spot in the shade
raft, logs and string, a sharp rock, tighter knots
birdhouse, bark and glue, a hungry cat, a taller pole
fort, sticks and blankets, a strong gust, wooden pegs
bridge, planks and rope, the rising water, two heavy posts
tower, blocks and tape, a clumsy elbow, a wider base
go-cart, crates and wheels, a deep hole, a better axle
doghouse, bricks and straw, a sudden storm, a stone floor
windmill, paper and pins, a blast of wind, a sheet of tin
scarecrow, straw and rags, a flock of crows, a sturdy pole
""")

# what may break, how
BREAKABLES = table("""
vase, cracked from top to bottom
teapot, lost its spout
plate, split in two
window, broke into a hundred pieces
bowl, shattered on the floor
picture frame, came apart at the corners
music box, stopped in the middle of its song
glass bird, lost one wing
flowerpot, spilled dirt over the rug
jug, leaked all over the shelf
chess board, snapped down the middle
bookend, chipped on both sides
""")

# plant, what it gives
PLANTS = table("""
sunflower, seeds for the birds
bean, long green beans
pumpkin, a pumpkin as big as a chair
strawberry, sweet strawberries
pea, plump green peas
tomato, juicy tomatoes
rose, sweet pink roses
tulip, bright tulips
melon, a melon with stripes
radish, crisp radishes
pepper, shiny peppers
daisy, a hundred daisies
""")

# noise, what makes it
NOISES = table("""
tap, a branch against the glass
scratch, claws on the wood
creak, a door on old hinges
thump, an apple on the roof
squeak, a wheel in the wind
rattle, a loose shutter
hoot, a voice in the chimney
drip, a leak in the kitchen
rustle, paper in the basket
clink, spoons in the drawer
""")

COLORS = word_list("""
red blue green yellow purple orange pink brown white black golden silver gray striped spotted violet
crimson turquoise cream maroon beige teal copper ivory
""")

SHAPES = word_list("""
little big shiny soft old new pretty tiny bright smooth special lovely funny fancy fine plain round heavy
neat dusty simple odd huge strong wide narrow light long short sturdy cheap rare fast square curved dull
""")

FOOD_LOOKS = word_list("""
warm fresh sweet tasty creamy crunchy spicy steaming leftover homemade hot cold salty buttery tender
bubbling
""")

TOOL_LOOKS = word_list("""
long thick wooden strong rusty tall small sharp heavy bent light dusty short curved smooth wet
""")

TOOL_KINDS = word_list("""
stick rope plank net rake ladder saw pole bucket hook shovel branch chain stool spade crowbar broom hammer
stake strap
""")

GAMES = phrase_list("""
hide and seek, tag, pirates, leapfrog, catch, checkers, hopscotch, tug of war, knights, store, school,
explorers, charades, marbles
""")

TREASURES = phrase_list("""
old coins, glass beads, pirate hats, picture books, tin soldiers, chocolate bars, silver spoons, letters
from long ago, colorful stones, costumes, paper stars, music boxes
""")

TRAPS = phrase_list("""
stuck in the mud, caught in a net, trapped under a branch, tangled in a string, stuck in a pipe, caught in
the brambles, trapped in a deep hole, stuck on a high ledge, locked in a crate, caught between two rocks
""")

PART_LOOKS = word_list("fresh good cheap white dark fine ripe local")
GOODS_LOOKS = word_list("fine cheap good new pretty fresh plain lovely")
BUILDING_LOOKS = word_list("tall grand crooked strong simple mighty fancy giant narrow")
BREAKABLE_LOOKS = word_list("thin tall precious shiny heavy tiny dusty painted")
TREASURE_LOOKS = word_list("rare shiny dusty precious golden funny ancient tiny")
