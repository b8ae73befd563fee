"""Plots about feelings: fear, rescue, getting lost, noises at night, wishes, newcomers, rain on a picnic."""

COURAGE = """
plot:afraid
- <afraid_of> <with_pal> <afraid_tease> // <when> <afraid_must> <fright> <afraid_help> // <afraid_do>
  <afraid_truth> <glad> <afraid_after>
- <with_pal> <afraid_of> <when> <afraid_must> <fright> // <ask_elder> <afraid_elder> <afraid_do>
  <afraid_truth> <afraid_after>
- <when> <arrive> <afraid_of> <fright> <meet_pal> <afraid_help> // <afraid_do> <afraid_truth> <thanks>
afraid_of
- <hero> was {scared} of {fear}, because {fear_why}.
- There was one thing that made <hero> {scared}: {fear}. "{Fear_why}," {he} {said}.
- "I do not like {fear}," <hero_said>. "{Fear_why}."
afraid_tease
- "Who is {scared} of {fear}?" <pal> {laughed}.
- <pal> was not {scared} of {fear} at all.
- <pal> was {scared} too, but only of {lone_beast}.
afraid_must
- {His} <thing> had landed there, and <hero> had to get it back.
- <elder> asked <hero> to bring {goods} to <neighbor>, and the way led past {landmark}.
- <hero> had promised <pal> to come along to the <place>.
afraid_help
- "I know what helps," <pal_said>. "{Fear_help}."
- <pal> took {his} hand. "When I am {scared}, I think of {fear_help}."
- "Try {fear_help}," <pal_said>. "And remember, {proverb}."
afraid_elder
- "I was {scared} of {fear} too," <elder_said>. "{Fear_help} always helped me."
- <elder> {laughed} softly. "All you need is {fear_help}."
afraid_do
- <hero> closed {his} eyes and counted to {number}. {then} {he} went on.
- With {fear_help} and {his} <wear> on, <hero> took one step, and then one more.
- <hero> held the hand of <pal>, and together they <walked> on.
afraid_truth
- And what was it? {Fear_truth}!
- <hero> opened {his} eyes. {Fear_truth}, and nothing more.
- "{Fear_truth}!" <hero_said>. "Is that all?"
afraid_after
- After that, <hero> was never {scared} of {fear} again.
- "You were {very} brave," {replied} <elder> and {gave} {him} {a_gift}.
- Now <hero> only laughed about {fear}.
lesson:afraid
- being brave means to [try|go on] although you are {scared}
- most things are [less scary|kinder|smaller] when you look closely
- [friends|good words|{pal} and {elder}] make you brave

plot:rescue
- <when> <arrive> <rescue_hear> <rescue_see> // <with_pal> <rescue_plan> <rescue_try> <rescue_free>
  <rescue_thanks> // <rescue_later> <rescue_back> <glad>
- <with_pal> <when> <arrive> <rescue_hear> <rescue_see> <rescue_try> // <rescue_plan> <rescue_free>
  <rescue_home>
- <when> <rescue_hear> <rescue_see> <rescue_try> <meet_pal> // <rescue_plan> <rescue_free> <rescue_home>
  <rescue_thanks>
rescue_hear
- {suddenly} {he} heard something {place1}. Somebody {beast_cried}.
- {Place2}, something {beast_cried} {very} softly.
- "Did you hear that?" whispered <hero>. Something {beast_cried} {place1}.
rescue_see
- It was {a_beast}, and it was {trap}!
- There <hero> saw {a_beast}. It was {trap} and could not get out.
- {A_beast} was {trap}. It looked at <hero> with sad eyes.
rescue_try
- <hero> pulled and pulled, but the <beast> was still {trap}.
- <hero> tried to help with {his} <wear>, but it was too short.
- "Do not be {scared}, little {beast}," <hero_said>. "I will help you."
rescue_plan
- "We need {a_tool}," <pal_said>, and {pal_he} <walked> off to get one.
- <pal> brought {a_tool} from the <house>.
- "{elder} has {a_tool}," <hero_said>. <pal> ran to fetch it.
rescue_free
- With the {tool} <hero> and <pal> got the <beast> out.
- <hero> held the {tool}, and <pal> pulled. One, two, three! The {beast} was free.
- {finally} the {tool} did its work, and the <beast> {beast_moved} out.
rescue_thanks
- The {beast} {beast_cried} and {beast_moved} around <hero> {number} times.
- "Thank you," the <beast> {beast_cried}. "I will never forget you, {hero}."
- The {beast} {beast_moved} back to {beast_home}, where its mother waited.
rescue_home
- <hero> gave the <beast> some {beast_food} and brought it back to {beast_home}.
- They took the <beast> home to <elder>, who fed it with {beast_food} for {number} days.
- <hero> wrapped the <beast> in {his} <wear> and carried it to {beast_home}.
rescue_later
- Some days later <hero> lost {his} <thing> <in_place>. <hero> {searched} {place3} and {place4}.
- On {day} <hero> could not find {his} <thing> anywhere.
rescue_back
- {suddenly} the {beast_look} {beast} {beast_moved} up to <hero>. It had the <thing> in its mouth!
- And who brought the {thing} back? The {beast_look} {beast} from {beast_home}!
lesson:rescue
- even small animals can be good friends
- one good deed brings [another|luck|two more]
- you should help [those who are in trouble|the weak|{lone_beast}]

plot:astray
- <when> <astray_warn> <astray_follow> <astray_far> <fright> // <astray_dark> <meet_pal> <astray_ask>
  <astray_way> // <astray_home> <astray_elder>
- <with_pal> <when> <astray_follow> <astray_far> <fright> // <astray_idea> <astray_way> <astray_home>
  <astray_elder>
astray_warn
- "Stay close to {landmark}," <elder> had [told|warned] {him}.
- "Do not go to the <far> alone," <elder> always {replied}.
astray_follow
- <hero> saw {a_beast} and <walked> after it.
- {A_beast} {beast_moved} past, and <hero> wanted to see {beast_home}.
- <hero> <walked> after {a_beast}, farther and farther, past {landmark}.
astray_far
- {suddenly} the <beast> was gone, and {he} was <in_far>, all alone.
- When {he} looked up, {he} saw {far_sight}. <he> had never been <in_far> before.
- <hero> could not see {landmark} anymore. <he> was lost <in_far>.
astray_dark
- It got dark <in_far>. <hero> sat down {far1} and put on {his} <wear>.
- <hero> looked for the way {far1} and {far2}, but everything looked the same.
- "{elder}! {elder}!" {he} called, but only {lone_beast} {beast_cried}.
astray_ask
- "I want to go home to {town}," {said} <hero>, "but I do not know the way."
- "Do you know the way to {landmark}?" asked <hero>.
astray_idea
- "Wait," <pal_said>. "From {far2} we can see {landmark}!"
- <pal> found {his} <wear> {far3}. "Look, {hero}, we came from there!"
astray_way
- "Look for {landmark}," <pal_said>. "Your <house> must be near it."
- <pal> <walked> ahead with {a_other}, and <hero> came after.
- They <walked> past {far_sight} and counted {number} trees, one after the other.
astray_home
- {finally} {he} saw {landmark}, and behind it the <house>.
- There was {landmark}! <hero> ran the rest of the way to the <house>.
astray_elder
- <elder> was waiting with <food>. "I was {very} {scared}," {elder_he} {replied}. "Never do that again!"
- <elder> hugged <hero> and {gave} <pal> some <food>.
- "I will never go to the <far> alone again," <hero_said>, and <elder> {gave} {him} some <food>.
lesson:astray
- you should stay close to [home|{landmark}|your house]
- it is [good|wise] to listen to {elder}
- you should ask [for help|{pal}|somebody] when you are lost

plot:noise
- <noise_bed> <noise_hear> <fright> <noise_guess> // <with_pal> <noise_call> <noise_go> <noise_find>
  <noise_sleep>
- <with_pal> <noise_stay> <noise_hear> <noise_guess> <fright> // <noise_go> <noise_no> <noise_find>
  <noise_sleep>
noise_bed
- One {weather_look} night <hero> lay in bed with {his} <thing>.
- It was late in the <house>, and <hero> could not sleep.
- <hero> had just put {his} <wear> on the chair when it got dark.
noise_stay
- One {weather_look} {day} <pal> stayed for the night, and they played {game} in bed.
- <pal> slept at the <house> of <hero> that {day}.
noise_hear
- {Noise}, {noise}, {noise}, it went. What was that?
- "{Noise}, {noise}!" came from [above|below|behind the door|the window].
- {suddenly} there was a strange sound: {noise}, {noise}, {noise}.
noise_guess
- "It is {a_beast}," thought <hero>.
- "Maybe it is a ghost with {a_wear}," whispered <hero>.
- "It must be a thief who wants my <thing>," thought <hero>.
noise_call
- <hero> called <pal>, who came with {a_other}.
- <pal> heard it too and brought {a_gift}.
noise_go
- They took {a_tool} and <walked> through the dark <house>.
- With {a_tool} in {his} hand, <hero> opened the door.
- Step by step they went on, <pal> with {a_other} and <hero> with {a_tool}.
noise_no
- {Noise}! <elder> was asleep, so it was not <elder>.
- They {searched} under the bed, but there was only {a_other}. {Noise}, {noise}!
noise_find
- And then they saw it: it was only {noise_source}!
- "It is only {noise_source}!" <pal_said>, and they both {laughed}.
- It was {noise_source}, and next to it sat {a_beast}. It {beast_cried}.
noise_sleep
- <elder> woke up and gave them some <food>. {then} everybody slept.
- <hero> {laughed}, hugged {his} <thing>, and fell asleep.
- {Noise}, {noise}, it went again. But now <hero> was not {scared} anymore.
lesson:noise
- [many|most|all] scary [things|sounds|noises] are harmless
- it is best to [look|ask|get up] before you worry
- nothing is scary when [a friend|{pal}|somebody] is near

plot:wish
- <when> <arrive> <wish_find> <wish_offer> <wish_one> // <wish_bad> <with_pal> <wish_pal> <gloom> //
  <wish_undo> <wish_end> <glad>
- <with_pal> <when> <wish_find> <wish_offer> <wish_one> <wish_bad> // <wish_pal> <wish_two> <wish_undo>
  <wish_end>
wish_find
- {Place1} <hero> found {a_other}. When {he} touched it, {a_beast} came out!
- <hero> helped {a_beast} that was {trap}. It was a magic {beast}!
- {A_beast} with {a_wear} sat {place1}. "I am magic," it {beast_cried}.
wish_offer
- "You have {number} wishes," the <beast> {beast_cried}. "Choose well!"
- "What do you wish for, {hero}?" asked the {beast}.
wish_one
- "I wish that everything were {thing_color}!" <hero_said>.
- "I want a hundred {treasure}!" <hero_said>.
- "I wish for <food>, every day and every hour," <hero_said>.
- "I wish for {a_gift} as big as {landmark}!" <hero_said>.
wish_bad
- Poof! At first <hero> was {happy}. But soon it was too much, and {his} <wear> did not fit anymore.
- Whoosh! It was there, and it was so big that the <house> fell over.
- Poof! There it was. But there was no room left for <elder> and the <thing>.
wish_pal
- <pal> came by, but {pal_he} could not get through the door.
- "I do not like this," <pal_said>. "I liked it better when you {thing_did} your <thing>."
- <pal> was {sad} and <walked> home without a word.
wish_two
- "I wish that {pal} were {happy} again," <hero_said>.
- "I wish for a small {gift}, just for {pal}," <hero_said>.
wish_undo
- "Please, {beast}, make everything as it was," <hero_said>.
- With the last wish <hero> gave everything back to the {beast_look} {beast}.
wish_end
- The {beast} {beast_cried}, and <hero> was back <in_place> with {his} <thing>.
- Poof! The {beast} {beast_moved} back to {beast_home}, and all was well.
- And there was <pal>, who {thing_did} the <thing> {thing_how}.
lesson:wish
- you should be careful [what you wish for|with magic|with big words]
- enough is as good as a feast
- the best things cannot be [wished for|bought|had by magic]

plot:newcomer
- <new_hear> <when> <new_see> <meet_new> <new_alone> // <new_mean> <new_hero> <new_ask> <new_play> //
  <new_show> <glad>
- <when> <arrive> <new_see> <meet_new> <new_alone> <new_hero> // <new_ask> <new_show> <new_play>
new_hear
- "Somebody new lives in the house next to {landmark}," <elder_said>.
- <neighbor> told <hero> about a new family in {town}.
new_see
- <in_place> somebody sat all alone {place1}.
- <hero> saw a new face <in_place>, {place2}.
meet_new
- It was {pal}, {a_pal} with {a_thing}.
- {A_pal} named {pal} looked at {pal_his} feet.
- "That is {pal}," <elder_said>. {Pal} was {a_pal} who had just come to {town}.
new_alone
- Nobody wanted to play {game} with <pal>.
- <pal> {thing_did} {pal_his} <thing> {thing_how}, all by {pal_himself}.
- <pal> had <food> for lunch, but nobody to eat it with.
new_mean
- The others made fun of {pal_his} <thing>.
- "{pal} is too {pal_trait} for us," said the others.
new_hero
- <hero> was {scared} to say something, but then {he} remembered: {proverb}.
- <hero> knew how it felt to be {sad} and alone.
- <hero> put on {his} <wear> and <walked> over to <pal>.
new_ask
- "{hello}! I am {hero}," {he} {said}. "Do you want to play {game}?"
- "I like your <thing>," <hero_said>. "May I {thing_do} it with you?"
- "{hello}, {pal}! Come with me. I will show you {place_sight}," <hero_said>.
new_play
- They {thing_did} the <thing> {thing_how} and {laughed}.
- <pal> was good at {game}, and soon all the others wanted to play too.
- <pal> {gave} <hero> half of {pal_his} <food>.
new_show
- <hero> showed <pal> {landmark}, the {shop} of <neighbor>, and the <place>.
- <hero> showed <pal> {place_sight} and {a_beast} {place3}.
- <pal> was not {sad} anymore. {Pal_he} {laughed} for the first time in {town}.
lesson:newcomer
- one kind word can [make a friend|change a day|help a lot]
- nobody should be alone[ in {town}|]
- new friends are waiting [everywhere|in every place|{place1}]

plot:picnic
- <with_pal> <when> <picnic_pack> <picnic_walk> <picnic_sit> // <picnic_rain> <gloom> <picnic_idea> //
  <picnic_fun> <glad>
- <when> <picnic_pack> <picnic_walk> <meet_pal> <picnic_sit> // <picnic_thief> <picnic_chase> <picnic_fun>
- <with_pal> <picnic_pack> <picnic_walk> <picnic_thief> <picnic_chase> // <picnic_rain> <picnic_idea>
  <picnic_fun>
picnic_pack
- <hero> packed <food>, {part1} and {a_thing} into {a_gift_color} basket.
- "Today we will have a picnic!" {said} <hero> and put <food> into {a_gift_color} basket.
- <elder> packed {a_gift_color} basket with <food>, {part1} and {a_thing}.
picnic_walk
- They <walked> past {landmark} to the <place>, where they saw {place_sight}.
- <hero> carried the {gift_color} basket to the <place>.
- On the way to the <place> they sang a song about {lone_beast}.
picnic_sit
- {Place1} they put down the {gift_color} basket, and <hero> {thing_did} the {thing} {thing_how}.
- They sat down {place1} and ate the <food>.
picnic_rain
- {suddenly} drops fell on the <food> and on {his} <wear>.
- {then} the sky turned dark, and thunder rolled over {landmark}.
picnic_idea
- "Quick, {place2}!" <pal_said>. There it was dry.
- <pal> made a roof out of {a_tool} and {his} <wear>.
- "Let us go to the {shop} of {neighbor}," <pal_said>. <neighbor> let them in.
picnic_thief
- But when <hero> opened the {gift_color} basket, there was no <food> left!
- {suddenly} {a_beast} {beast_moved} by and took the <food>.
picnic_chase
- They <walked> after it to {beast_home}. There {number} little ones {beast_cried}. They were hungry.
- "Stop!" <hero_said>. But then {he} saw how hungry the <beast> was. "You may have it."
- <hero> gave the <beast> some {beast_food} instead, and it gave back the {gift_color} basket.
picnic_fun
- So they played {game} {place2} and ate {part1} with {part2}.
- <pal> told a story about {a_beast}, and <hero> {thing_did} the <thing> {thing_how}.
- They ate what was left and {laughed} about the {beast}.
lesson:picnic
- a good friend can save a bad [day|{day}|picnic]
- things can be fun even when [they go wrong|it rains|the food is gone]
- it is better to laugh than to [cry|be angry|complain]
"""
