"""Where and when: places and what is seen there, towns, houses, weather."""

from lmkit.data.stories.tables import table, word_list

# noun, preposition, four spots, something to see there
PLACES = table("""
park, in, under a bench, behind the swings, beside the fountain, near the slide, children on the swings
forest, in, under a fallen log, behind a rock, inside a hollow tree, among the ferns, rays of light
beach, on, under a striped towel, behind the sand dunes, beside a tide pool, near the pier, waves with white tops
farm, on, under the hay, behind the barn, beside the tractor, near the well, cows in the field
market, at, under a fruit stand, behind the barrels, beside the flower cart, near the gate, heaps of tomatoes
library, in, under a desk, behind the tallest shelf, beside the globe, near the stairs, rows of books
school, at, under the teacher's chair, behind the blackboard, beside the lockers, near the door, drawings on the walls
zoo, at, under the bridge, behind the ticket booth, beside the monkey house, near the pond, giraffes with long necks
garden, in, under the rose bush, behind the shed, beside the tomato plants, near the birdbath, bees on the flowers
meadow, in, under a daisy, behind a haystack, beside the stream, near the fence, butterflies in the grass
river, by, under the bridge, behind the willow, beside the rocks, near the dock, boats on the water
lake, by, under the dock, behind the reeds, beside the canoe, near the picnic table, swans on the water
hill, on, under the oak tree, behind the big stone, beside the path, near the top, houses far below
playground, at, under the monkey bars, behind the seesaw, beside the sandbox, near the tunnel, kids on the seesaw
station, at, under a suitcase, behind the clock, beside the tracks, near the ticket window, trains with long tails
castle, at, under the drawbridge, behind a suit of armor, beside the throne, near the tower, flags on the towers
orchard, in, under a ladder, behind the baskets, beside the cider press, near the stone wall, trees full of apples
harbor, at, under a fishing net, behind the crates, beside an anchor, near the lighthouse, ships with tall masts
museum, at, under a glass case, behind a statue, beside the mummy, near the painting, bones of a dinosaur
bakery, in, under the counter, behind the oven, beside the flour sacks, near the window, loaves of bread
barn, in, under the wagon, behind the hay bales, beside the saddle, near the horses, swallows in the roof
attic, in, under a sheet, behind the trunk, beside a chair, near the tiny window, dust in the light
cave, in, under a stone, behind a corner, beside the waterfall, near the entrance, bats on the ceiling
desert, in, under a thorny bush, behind a dune, beside a cactus, near the dry well, sand in every direction
mountain, on, under a ledge, behind a pine tree, beside the spring, near the hut, snow on the peaks
fair, at, under the merry-go-round, behind the popcorn stand, beside the tent, near the big wheel, colored lights
valley, in, under a hedge, behind the mill, beside the brook, near the crossroads, sheep on the slopes
island, on, under a palm tree, behind the driftwood, beside the lagoon, near the wrecked ship, parrots in the trees
""")

PLACE_LOOKS = word_list("""
quiet old big lovely busy green famous little lonely pretty wide sunny shady distant cozy peaceful crowded
empty
""")

SPOT_LOOKS = word_list("""
dusty old big little wet mossy broken crooked quiet sunny shady far narrow cracked painted cold clean
round rusty low
""")

TOWN_FIRST = word_list("""
Apple Berry Birch Bright Cherry Clover Elm Fern Green High Honey Little Long Maple Misty Mossy North Oak
Pine Quiet River Rose Sandy Silver Stony Sunny Sweet White Willow Windy Amber Copper Crystal Dusty Eagle
Fox Golden Hazel Iron Lemon Mint Moon Plum Robin Snowy Star Thorn Velvet Violet Wind
""")

TOWN_LAST = word_list("""
Hill Valley Village Town Bay Creek Falls Meadow Harbor Ridge Springs Grove Crossing Corner Heights Hollow
""")

HOUSE_LOOKS = word_list("""
small tall cozy grand quiet funny round crooked narrow pretty sunny dusty tidy simple large lonely shabby
warm humble bright noisy strange
""")

HOUSE_KINDS = word_list("""
house cottage cabin hut farmhouse home shack bungalow lodge villa mansion
""")

LANDMARK_LOOKS = word_list("""
old red stone tall white crooked broken great mossy lonely wooden haunted iron black leaning round ancient
empty little
""")

LANDMARK_KINDS = word_list("""
mill tower bridge barn chimney windmill gate well church statue wall oak pine signpost fountain silo
archway watchtower chapel lamp mailbox stable greenhouse hedge
""")

WEATHER = {
    "sun": word_list("sunny bright warm clear golden"),
    "rain": word_list("rainy wet gray stormy"),
    "wind": word_list("windy breezy blustery"),
    "snow": word_list("snowy frosty icy white"),
    "fog": word_list("foggy misty hazy"),
    "heat": word_list("hot dry summer"),
    "cloud": word_list("cloudy cool mild quiet"),
}
TIMES = word_list("morning afternoon evening")
DAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = word_list("three four five six seven eight nine ten twelve")
