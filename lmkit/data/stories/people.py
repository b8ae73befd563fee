"""Who there is: names, what people are like, what they do for a living."""

from lmkit.data.stories.tables import phrase_list, table, word_list

GIRLS = word_list("""
Ada Alice Amber Amy Anna Aria Bella Beth Bonnie Carla Cara Cathy Chloe Cindy Cora Daisy Dana Dora Edie
Ella Ellie Elsa Emma Erin Esme Eva Faith Fay Fiona Flora Freya Gemma Gina Grace Greta Hana Hannah Hazel
Heidi Helen Holly Ida Ines Iris Isla Ivy Jane Jasmine Jenny Jill Joan Josie Joy Julia June Kara Kate Kira
Kitty Lara Laura Layla Lena Lexi Lia Lily Lisa Lola Lottie Lucy Luna Lydia Mabel Maggie Mandy Mara Maria
Martha Maya Meg Mia Millie Mina Molly Nadia Nancy Nell Nina Nora Olive Olivia Paula Pearl Penny Petra
Polly Rita Rosa Ruby Ruth Sally Sara Sofia Stella Sue Tara Tess Tilly Tina Una Vera Vicky Wendy Willa Yara
Zara Zoe Abby Agnes Alma Anita April Astrid Audrey Ava Becky Bertha Betty Bridget Carmen Carol Celia Clara
Connie Corinne Daphne Debbie Della Diana Donna Doris Edith Elena Elise Emily Erika Estelle Esther Evelyn
Fern Frances Gail Gloria Gwen Harriet Hetty Hope Ingrid Irene Jade Janet Jessie Joanna Judy Juliet Karen
Kelly Laurel Leah Leonie Linda Lotta Louise Mable Margot Marta Mary Matilda Maud May Mildred Monica Myra
Naomi Nelly Nettie Norma Odette Paige Pam Patty Phoebe Pia Rachel Ramona Rhoda Robyn Rosie Roxy Sabrina
Sandra Selma Shirley Sonia Sylvia Tamara Thelma Theresa Toni Trudy Ursula Valerie Verity Viola Violet
Wanda Winnie Yvonne
""")

BOYS = word_list("""
Aaron Abe Adam Alan Albert Alex Alfie Andy Anton Archie Arlo Barry Ben Bert Bill Billy Bobby Boris Brian
Caleb Carl Charlie Chris Clark Colin Dan Danny David Dean Dennis Dylan Eddie Eli Elliot Emil Eric Ethan
Felix Finn Frank Fred Gary George Gus Hank Harry Henry Hugo Ian Ira Isaac Jack Jacob Jake James Jamie
Jason Jay Jeff Jim Jimmy Joe Joel John Jonah Josh Juan Karl Ken Kevin Kit Kyle Lee Len Leo Levi Liam Lou
Louis Lucas Luke Marco Mark Martin Matt Max Mike Milo Nate Ned Neil Nick Noah Oliver Omar Oscar Otis Otto
Owen Pablo Paul Pete Peter Phil Ralph Ray Rob Robin Ron Roy Ryan Sam Scott Sid Simon Steve Ted Theo Tim
Toby Tom Tony Victor Walter Will Zack Alec Alvin Amos Angus Arnold Arthur Austin Axel Basil Benny Bernie
Boyd Brad Bruce Bruno Calvin Casper Cecil Chad Chester Claude Clive Conrad Craig Cyril Damon Daryl Derek
Diego Donald Doug Duncan Dwight Earl Edgar Edwin Elmer Elvis Ernie Errol Evan Ezra Fergus Floyd Gavin
Gilbert Glen Gordon Graham Grant Gregory Guy Harold Harvey Hector Herman Homer Howard Hubert Humphrey Igor
Irving Ivan Jasper Jerome Jerry Jonas Jules Keith Kurt Lars Leon Leroy Lloyd Lorenz Luther Lyle Malcolm
Marvin Maurice Miles Milton Morris Murray Nigel Norman Oleg Orson Percy Philip Quentin Ralf Randy Reggie
Rex Rick Roger Roland Rufus Rupert Rusty Seth Shane Silas Stan Stefan Stuart Timothy Todd Trevor Troy
Vernon Vince Wally Warren Wayne Wilbur
""")

ANIMAL_NAMES = word_list("""
Acorn Bandit Bean Biscuit Bramble Bubbles Bumble Button Buzz Caramel Chip Clover Coco Cookie Crumb Dash
Dot Fern Fluff Freckle Fudge Fuzzy Ginger Happy Honey Jelly Maple Marble Midge Misty Moss Muffin Nibbles
Nutmeg Olly Patch Peanut Pebble Pepper Pickle Pip Plum Pogo Poppy Puck Puddle Pumpkin Rusty Sandy Scout
Skip Smoky Snowy Socks Spark Speck Spot Sunny Teddy Tiptoe Toffee Truffle Twig Waffles Whiskers Zippy
Almond Amigo Apricot Basil Boots Bouncy Brownie Buster Butter Cherry Cinder Cocoa Comet Cricket Cuddles
Curly Dandy Domino Dusty Echo Feather Flick Flip Frosty Giggles Goldie Hazelnut Iggy Jingle Lucky Mango
Minty Mochi Noodle Oreo Paddy Peaches Pixie Pretzel Pumpernickel Quill Raisin Ripple Sesame Shadow Sparky
Sprout Sugar Tango Tinker Topsy Velvet Wiggles Ziggy
""")

SURNAMES = word_list("""
Appleby Baker Barrow Bell Berry Birch Brook Brown Carter Cole Cook Cooper Dale Day Field Finch Fisher Fox
Gray Green Hall Hart Hill Hood Lamb Lake Lane Marsh Mason Miller Moon Page Parker Penn Pike Pond Potter
Price Reed Rivers Rose Shaw Stone Swan Taylor Thorn Turner Webb Wells West White Winter Wood Young Archer
Ash Banks Barnes Beck Bishop Blake Bloom Bond Bright Burns Bush Butler Carver Chase Church Clay Crane
Cross Drake Dunn Farmer Flint Ford Frost Gale Glass Grove Harper Hawk Heath Hunter Joyce King Knight Law
Locke Long March Mills Nash North Palmer Pepper Perry Piper Pratt Quick Rice Rowe Sharp Short Silver Snow
Spring Steel Stern Storm Sutton Tate Vale Walker Wolf Wren
""")

TRAITS = word_list("""
kind shy brave curious clever cheerful quiet careful gentle lively messy patient playful polite proud
silly stubborn sleepy thoughtful noisy helpful friendly lazy dreamy bold busy honest bossy forgetful
hungry cheeky calm charming dear eager fearless funny grumpy jolly loyal merry mild modest moody nosy
obedient peaceful quick restless sensible serious smart sneaky stern talkative timid tough trusting warm
wild witty zany
""")

LOOKS = word_list("""
small tall skinny round freckled chubby lanky nimble sturdy rosy scruffy cute pretty strong tiny barefoot
slim plump thin short stout slender curly graceful clumsy muscular pale handsome fluffy tidy petite neat
""")

ELDER_LOOKS = word_list("""
dear old kind wise busy tired gentle good brave clever cheerful quiet strict jolly patient funny
""")

CLOTHS = word_list("""
wool cotton velvet silk leather knitted woven furry linen paper fleece satin quilted checkered
""")

CLOTHES = word_list("""
hat scarf coat cap sweater jacket ribbon cape apron vest shirt belt hood tunic cloak sash robe bonnet
beret pullover poncho bandana
""")

VOICES = word_list("""
soft low high clear deep tiny merry sleepy gentle warm shaky loud squeaky calm firm bright hoarse rough
thin husky silvery lazy
""")

QUIRK_VERBS = word_list("scratched rubbed touched tapped pulled pinched stroked poked")

QUIRK_PARTS = phrase_list("""
nose, left ear, right ear, chin, elbow, head, left knee, right knee, cheek, neck, belly, left foot, right foot,
forehead
""")

WALK_HOW = word_list("bravely proudly calmly gladly boldly eagerly quietly shyly politely dreamily")

# job, where, what is sold or made there, one task there, the same in the past
JOBS = table("""
baker, bakery, bread, knead the dough, kneaded the dough
farmer, farm, eggs, feed the hens, fed the hens
doctor, clinic, medicine, fold the towels, folded the towels
gardener, greenhouse, roses, water the seedlings, watered the seedlings
carpenter, workshop, chairs, sand the boards, sanded the boards
sailor, boathouse, ropes, scrub the deck, scrubbed the deck
painter, studio, pictures, wash the brushes, washed the brushes
shoemaker, shoe shop, boots, polish the boots, polished the boots
tailor, tailor shop, coats, sort the buttons, sorted the buttons
teacher, schoolhouse, lessons, clean the board, cleaned the board
blacksmith, forge, horseshoes, carry the coal, carried the coal
beekeeper, bee yard, honey, fill the jars, filled the jars
fisherman, fish shop, trout, mend the nets, mended the nets
miller, mill, flour, stack the sacks, stacked the sacks
toymaker, toy shop, toys, dust the shelves, dusted the shelves
candle maker, candle shop, candles, melt the wax, melted the wax
clockmaker, clock shop, clocks, oil the gears, oiled the gears
potter, pottery, pots, mix the clay, mixed the clay
grocer, grocery, fruit, count the pears, counted the pears
musician, music hall, songs, tune the piano, tuned the piano
""")

# species, sound it makes, way it moves, home, food
ANIMALS = table("""
duck, quacked, waddled, the reeds, bread crumbs
rabbit, squeaked, hopped, a warm burrow, carrots
fox, yelped, trotted, a den under the roots, wild berries
bear, growled, lumbered, a deep cave, honey
mouse, squeaked, scurried, a hole in the wall, cheese
squirrel, chattered, scampered, a hollow tree, acorns
hedgehog, snuffled, shuffled, a pile of leaves, mushrooms
frog, croaked, leaped, a lily pad, flies
turtle, hummed, crawled, a muddy bank, lettuce
owl, hooted, glided, an old barn, seeds
robin, chirped, fluttered, a nest in the hedge, worms
crow, cawed, flapped, the tallest branch, corn
kitten, meowed, crept, a soft basket, warm milk
puppy, barked, bounded, a wooden kennel, bones
lamb, bleated, skipped, a green hillside, clover
pony, neighed, galloped, a clean stable, oats
goat, bleated, climbed, a rocky ledge, thistles
piglet, oinked, trotted, a muddy pen, potatoes
hen, clucked, strutted, a straw nest, grain
goose, honked, waddled, a grassy island, weeds
donkey, brayed, plodded, a dusty barn, hay
badger, grunted, shuffled, a tunnel in the hill, roots
beaver, grunted, paddled, a dam of sticks, bark
otter, whistled, swam, a cozy riverbank, fish
deer, snorted, darted, a quiet thicket, fresh grass
monkey, chattered, swung, a leafy treetop, bananas
parrot, squawked, flapped, a golden cage, nuts
elephant, trumpeted, stomped, a wide plain, melons
lion, roared, prowled, a sunny rock, meat
penguin, squawked, slid, an icy shore, shrimp
snail, sighed, crawled, a curly shell, cabbage
bee, buzzed, zoomed, a busy hive, nectar
butterfly, whispered, fluttered, a patch of flowers, pollen
cricket, chirped, jumped, a crack in the wall, grass
dragon, roared, soared, a smoky cavern, hot soup
mole, grumbled, tunneled, a dark tunnel, beetles
swan, hissed, drifted, a calm lake, water plants
chick, peeped, toddled, a warm coop, crumbs
""")

# Small enough to be rescued and carried.
SMALL_ANIMALS = word_list("""
badger chick crow duck fox frog goose hedgehog hen kitten lamb mole mouse owl parrot penguin piglet puppy
rabbit robin squirrel turtle
""")

ANIMAL_LOOKS = word_list("""
small tiny fluffy muddy hungry thin young lonely plump tired wet scruffy sleepy dusty skinny clumsy shaky
grumpy nervous round quick fat
""")
FURS = word_list("gray brown black white silver spotted golden dark pale striped")
