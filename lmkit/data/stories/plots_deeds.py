"""Plots about doing: cooking, building, growing, learning, racing, helping, carrying a letter."""

DEEDS = """
plot:cook
- <with_pal> <when> <cook_start> <cook_missing> // <cook_go> <cook_neighbor> <cook_bring> // <cook_mix>
  <cook_ready> <cook_eat>
- <when> <cook_start> <cook_missing> <meet_pal> <hello> // <cook_pal> <cook_mix> <cook_oops> <cook_ready>
  <cook_eat>
- <with_pal> <pal> was ill. <when> <cook_start> <cook_mix> <cook_oops> // <cook_missing> <cook_go>
  <cook_neighbor> <cook_ready> <cook_sick>
cook_start
- <hero> wanted to make <food> with <elder>.
- "Let us make <food>!" <hero_said>. "We need {part1}, {part2} and {part3}," <elder_said>.
- <elder> wanted to cook <food>. "For that we need {part1}, {part2} and {part3}," {elder_he} {replied}.
cook_missing
- There were {part1} and {part2} in the kitchen, but no {part3}.
- "We have {part1}, and we have {part2}," <hero_said>. "But I see no {part3}."
- <elder> went through every shelf. There was no {part3} left!
- But {lone_beast} had eaten all of the {part3}.
cook_go
- So <hero> put on {his} <wear> and <walked> to the {shop} of <neighbor>.
- <hero> <walked> past {landmark} to <neighbor>.
- "{neighbor} the {job} may have some {part3}," <elder_said>, and <hero> <walked> off.
cook_neighbor
- "{hello}, {neighbor}! Do you have some {part3}?" asked <hero>.
- "I will give you {part3} if you {job_do}," {replied} <neighbor>. So <hero> {job_did}.
- <neighbor> {gave} <hero> the {part3} and asked for some of the <food>.
cook_bring
- <hero> carried the {part3} home in {his} <wear>.
- On the way back {he} met <pal>, who wanted to help.
- {A_beast} {beast_moved} after <hero>, for it wanted some {part3} too.
cook_pal
- "I have {part3} at home," <pal_said>. "Wait here!"
- <pal> <walked> home and came back with a bag full of {part3}.
cook_mix
- They put the {part1} and the {part2} into {a_thing_color} pot, and <hero> stirred.
- <hero> cut the {part1}, <elder> added the {part2}, and the {part3} came last.
- First came the {part1}. {then} came the {part2}. The <house> smelled wonderful.
cook_oops
- Oops! <hero> dropped the {part1}. "Never mind," <elder_said>.
- There was {part2} on {his} nose and {part1} on {his} <wear>. <elder> {laughed}.
- <hero> put in {number} spoons of {part2}. It was far too much!
cook_ready
- {finally} the <food> was ready.
- After an hour <elder> put the <food> on the table.
- <hero> waited and waited, and then there was <food>.
cook_eat
- <hero>, <pal> and <elder> ate the <food> and {laughed}.
- <pal> had {number} plates of <food>!
- <hero> brought some of the <food> to <neighbor> and some to <pal>.
- "This is the best <food> in {town}!" <pal_said>.
cook_sick
- <hero> <walked> to <pal> with the <food>. <pal> ate it and felt much better.
- <pal> took a bite of the <food>. "Now I am well again," {pal_he} {replied}.
lesson:cook
- [food|{plain_food}] tastes best when you share it
- [many|four|six] hands make light work
- good [things take|cooking takes|food takes] time

plot:build
- <with_pal> <when> <arrive> <build_plan> <build_work> <build_work_more> // <build_ruin> <gloom>
  <build_again> <build_strong> // <build_done> <glad>
- <when> <build_plan_alone> <build_work> <build_ruin> <gloom> // <meet_pal> <build_offer> <build_again>
  <build_strong> <build_done> <thanks>
build_plan
- "Let us build {a_building}!" <hero_said>, and <pal> fetched {material}.
- <hero> and <pal> wanted to build the biggest <building> in {town}.
- "We need {material} for {a_building}," <pal_said>.
build_plan_alone
- <hero> wanted to build {a_building} <in_place>, all by {himself}.
- <hero> carried {material} to the <place>. "I will build {a_building}, and nobody may help me!"
build_work
- <he> worked with {material} all {time}, until the <building> was as tall as {landmark}.
- <hero> put {a_thing} on top of the <building>.
- The <building> grew and grew, and {he} painted it {thing_color}.
build_work_more
- <pal> brought more {material}, and <hero> sang a song about {place_sight}.
- <hero> built the left side, and <pal> built the right side.
- <pal> put {a_gift_color} flag on the <building>.
build_ruin
- But then {ruin} came, and the <building> fell apart.
- {suddenly} there was {ruin}. Crash! No more <building>.
- That {time} {ruin} hit the <building>, and only {material} was left.
build_again
- "We can build it again," <pal_said>. "{Proverb}."
- <pal> picked up the {material}. "This time we will use {support}."
- <hero> dried {his} tears. "Let us try {support}," {he} {said}.
build_offer
- "May I help you? I know how to use {support}," <pal_said>.
- "Two can build better than one," <pal_said>.
build_strong
- They used {support}, and now the <building> stood firm.
- <elder> came with {support}, and together they began again.
- With {support} the new <building> was much stronger.
build_done
- When {ruin} came again, the <building> did not fall.
- {finally} the <building> was done, and <hero> put the <thing> on top.
- All of {town} came to see the <building> <in_place>.
lesson:build
- you can [always|almost always] begin again
- two [build|work|can do it] better than one
- [what falls down|a {building}] can be built again

plot:grow
- <grow_seed> <grow_plant> <grow_wait> // <with_pal> <grow_doubt> <grow_care> <grow_danger> // <grow_done>
  <glad> <grow_share>
- <with_pal> <when> <grow_seed> <grow_plant> <grow_doubt> // <grow_wait> <grow_danger> <grow_care>
  <grow_done> <grow_share>
grow_seed
- <neighbor> {gave} <hero> {a_plant_color} seed. "It will be a {plant}," {neighbor_he} {replied}.
- <hero> found {a_plant_color} seed {place1}. "That is a {plant} seed," <elder_said>.
- <elder> bought <hero> a {plant} seed in {a_plant_color} bag.
grow_plant
- <hero> dug a hole behind the <house> and put the {plant} seed in.
- <he> planted the {plant} next to {landmark}.
- <hero> put the seed into {a_plant_color} pot and gave it some water.
grow_wait
- The next {time} <hero> <walked> to the {plant}. There was nothing to see.
- <hero> waited for {number} days, but no {plant} came up.
- "Why does my {plant} not grow?" <hero_said>. "Be patient," <elder_said>.
grow_doubt
- "Your {plant} will never grow," <pal_said>. But <hero> did not listen.
- "Maybe the {plant} is asleep," <pal_said>.
- <pal> pointed at the little pot. "Where is your {plant}?"
grow_care
- Every {time} <hero> gave the {plant} water, and {he} sang to it.
- When it was {weather_look}, <hero> covered the {plant} with {his} <wear>.
- <hero> pulled the weeds and talked to the {plant} about <pal>.
grow_danger
- One {day} {lone_beast} wanted to eat the {plant}. <hero> gave it some {beast_food} instead.
- {suddenly} {a_beast} {beast_moved} toward the {plant}. "Stop!" <hero_said>.
- {then} came {a_weather} night, and <hero> put {his} <wear> around the {plant}.
grow_done
- {finally} a green leaf came up, and after {number} weeks it bore {harvest}!
- One {time} the {plant} was as tall as <hero>. It bore {harvest}.
- After {number} weeks the {plant} bore {harvest}.
grow_share
- <hero> gave some to <pal>, some to <elder> and some to <neighbor>.
- "You were right," <pal_said>. "Your {plant} is wonderful."
- <hero> {gave} <pal> a {plant} seed in {a_plant_color} bag.
lesson:grow
- [good things grow|a {plant} grows|most things grow] slowly
- you must [be patient|wait and hope|give things time]
- a little [care|water|love] every day works wonders

plot:learn
- <learn_wish> <learn_first> <gloom> <with_pal> <learn_tip> // <learn_again> <learn_again_more> //
  <learn_done> <glad> <learn_show>
- <with_pal> <learn_pal_can> <learn_wish> <when> <learn_first> <learn_laugh> // <ask_elder>
  <learn_tip_elder> <learn_again> <learn_done> <glad>
- <when> <meet_pal> <learn_pal_can> <learn_wish> <learn_first> <learn_tip> <learn_again_more> //
  <learn_done> <learn_show> <thanks>
learn_wish
- <hero> wanted to learn to {skill}.
- "I wish I could {skill}," <hero_said>.
- More than anything, <hero> wanted to {skill} like <elder>.
learn_pal_can
- <pal> could {skill} better than anybody in {town}.
- <hero> saw how <pal> {skill_did} <in_place>.
learn_first
- <in_place> <hero> tried to {skill}, but {he} {mishap}.
- <he> tried {number} times to {skill}. Every time {he} {mishap}.
- The first time <hero> {mishap}. The second time {he} {mishap} again.
learn_laugh
- {A_beast} {beast_cried}, and <hero> thought that it made fun of {him}.
- "I cannot {skill}!" <hero_said>. "I will never try again."
learn_tip
- "The trick is to {advice}," <pal_said>.
- "When I learned to {skill}, I {mishap} {number} times," <pal_said>. "You must {advice}."
- <pal> showed {him} how to {advice}.
learn_tip_elder
- "If you want to {skill}, {advice}," <elder_said>.
- "I {mishap} too when I was small," <elder_said>. "{neighbor} told me to {advice}."
learn_again
- <hero> tried to {advice}, just as {he} had been told. It was a little better.
- Every {time} <hero> <walked> to the <place> and tried again.
- <hero> tried again on {day}, with {his} <wear> on for luck.
learn_again_more
- Once more {he} {mishap}. But <hero> did not give up.
- "{Advice}, {advice}," <hero> said to {himself}.
- <pal> clapped and told {him} to {advice}.
learn_done
- And then <hero> {skill_did}, all by {himself}!
- {finally} <hero> {skill_did}, and <pal> clapped {number} times.
- "Look, {elder}!" <hero_said>, and {he} {skill_did} as if it were nothing.
learn_show
- <elder> and <neighbor> came to the <place> to see how <hero> {skill_did}.
- Now <hero> teaches {lone_beast} to {skill}.
lesson:learn
- practice makes you [better|strong|proud]
- you should never [give up|lose hope|stop trying]
- everybody [falls|fails|has to try] before they can {skill}

plot:race
- <with_pal> <race_boast> <race_day> <race_start> // <race_ahead> <race_stop> <race_slow> // <race_end>
  <race_after>
- <meet_pal> <race_boast> <race_agree> // <race_day> <race_start> <race_ahead> <race_stop> <race_slow>
  <race_end> <sorry> <forgive>
race_boast
- "I am the fastest in {town}," <hero_said>. "Nobody can beat me, least of all {pal}."
- <hero> made fun of <pal>. "You are much too slow to race with me!"
- <hero> could run faster than <pal>, and {he} talked about it every {time}.
race_agree
- "Then let us race from {landmark} to the <place>," <pal_said>.
- "On {day} we will race to the <place>," <pal_said>.
race_day
- On {day} they met at {landmark}. The winner would get {a_gift} from <neighbor>.
- <neighbor> had put up {a_gift} for the winner.
- <when_short> all of {town} came to {landmark}. The prize was {a_gift}.
race_start
- "One, two, three, go!" called <neighbor>. <hero> raced past {landmark}.
- <elder> waved {a_wear}, and off they went to the <place>.
- <neighbor> rang a bell, and <hero> and <pal> ran.
race_ahead
- Soon <hero> was far ahead and saw {place_sight}.
- <hero> looked back. <pal> was still near {landmark}.
- <hero> was so far ahead that {he} {laughed}.
race_stop
- "I have time to eat some <food>," thought <hero>, and {he} sat down {place1}.
- <hero> stopped to {thing_do} {his} <thing> {thing_how}.
- <he> lay down {place1} and put {his} <wear> over {his} eyes.
race_slow
- {pal} <walked> step by step, with {pal_his} eyes on the <place>.
- Meanwhile <pal> did not stop, not even for <food>.
- <pal> was tired, but {pal_he} thought of the <gift> and went on.
race_end
- When <hero> looked up, <pal> was already <in_place>. <pal> got the <gift>!
- <hero> jumped up and ran, but it was too late. <pal> had won the <gift>.
- "{wow}!" called <neighbor>. "The <gift> goes to {pal}!"
race_after
- "You were great, {pal}," <hero_said>. <pal> let {him} {gift_do} the {gift} too.
- <hero> was {sad}, but <pal> {laughed}. "Come, let us {gift_do} the <gift> together."
lesson:race
- slow and steady [wins the race|gets there first|is fast enough]
- you should not [boast|brag|sleep in a race]
- it is [not wise|unkind] to laugh at [others|{pal}|slow people]

plot:help
- <when> <help_see> <help_busy> <with_pal> <help_think> // <help_one> <help_two> <help_three> //
  <help_reward> <help_back>
- <with_pal> <when> <help_see> <help_one> <help_pal> <help_three> // <help_reward> <glad>
help_see
- <neighbor> had hurt {neighbor_his} leg and could not {job_do}.
- <hero> saw <neighbor> in front of the {shop}. {Neighbor_he} looked {sad}.
- The {shop} of <neighbor> was closed. "I am ill," {neighbor_he} {replied}.
help_busy
- <hero> wanted to {thing_do} {his} <thing>, but {he} kept thinking of <neighbor>.
- "I want to play {game}," thought <hero>. "But {neighbor} needs me."
help_think
- "Who will {job_do} now?" asked <pal>. "We will!" <hero_said>.
- "Let us {job_do} and {chore1} for {neighbor}," <hero_said>.
help_one
- First <hero> {job_did} at the {shop}.
- <hero> put {his} <wear> away and {job_did}.
- So <hero> <walked> to the {shop} and {chore1_did}.
help_pal
- <pal> came to the {shop} too and {chore2_did}.
- "I will {chore2}," <pal_said>. "You can {chore3}."
help_two
- {then} <pal> {chore2_did}, and <hero> {chore3_did}.
- {A_beast} {beast_moved} into the {shop}, and <pal> had to chase it out.
help_three
- They {chore3_did} and made some <food> for <neighbor>.
- At the end they sold {number} baskets of {goods}.
- They worked until {number} o'clock, and the {shop} was clean.
help_reward
- <neighbor> was {happy} and {gave} <hero> {a_gift}.
- "What can I give you?" asked <neighbor>. "Nothing," <hero_said>.
- "Here is {a_gift} for you both," {replied} <neighbor>.
help_back
- The next {day} <hero> lost {his} <thing>, and it was <neighbor> who found it {place2}.
- When <hero> was ill, <neighbor> brought {him} {goods} and <food>.
lesson:help
- kindness [comes back to you|never gets lost|costs nothing]
- it feels [good|better than any game] to help
- neighbors should [look after|help|care for] each other

plot:letter
- <letter_job> <letter_warn> <letter_go> <with_pal> // <letter_stop> <letter_lost> <gloom> <letter_found> //
  <letter_there> <letter_home>
- <when> <letter_job> <letter_warn> <letter_go> <meet_pal> <letter_tempt> <letter_no> // <letter_stop>
  <letter_there> <letter_home>
letter_job
- "Please take this {thing_color} letter to {neighbor} the {job}," <elder_said>.
- <elder> {gave} <hero> {a_thing_color} letter for <neighbor>, who worked at the {shop}.
- <hero> had to bring some <food> and {a_thing_color} letter to <neighbor>.
letter_warn
- "Do not stop <in_place>, and be there by {number} o'clock!"
- "Go past {landmark} and do not talk to strangers," {elder_he} added.
- "And do not lose it," {elder_he} {replied}. "It is {very} important."
letter_go
- <hero> put the letter under {his} <wear> and <walked> past {landmark}.
- With the {thing_color} letter in one hand, <hero> <walked> to the {shop}.
letter_tempt
- "Come and play {game} with me!" <pal_said>.
- "Let us look at {place_sight}," <pal_said>. "It will not take long."
letter_no
- "First I must bring this {thing_color} letter to {neighbor}," <hero_said>. "Come with me!"
- <hero> shook {his} head. "I promised {elder}," {he} {said}.
letter_stop
- <in_place> {he} saw {place_sight} and stopped for a moment.
- {A_beast} {beast_moved} across the road and {beast_cried}. <hero> gave it some {beast_food}.
- {suddenly} the wind took the {thing_color} letter and blew it {place1}.
letter_lost
- When {he} looked again, the {thing_color} letter was gone.
- <hero> felt under {his} <wear>. There was no letter!
letter_found
- "Is this your letter?" asked <pal>. It had been {place2}.
- {A_beast} {beast_moved} up to <hero> with the {thing_color} letter in its mouth.
- <hero> and <pal> {searched} {place1} and {place2}. {finally} they found the letter {place3}.
letter_there
- {finally} <hero> stood in the {shop}, and <neighbor> read the {thing_color} letter.
- <neighbor> opened the letter and {laughed}. "{elder} asks you all to eat <food> on {day}!"
- <neighbor> {gave} <hero> some {goods} for <elder>.
letter_home
- "You kept your promise," {replied} <elder> and {gave} {him} {a_gift}.
- On {day} <neighbor> and <pal> came to the <house>, and there was <food> for everyone.
- <hero> told <elder> about the {beast}, the letter and <neighbor>.
lesson:letter
- a promise is a promise
- you should [finish|end] what you [began|started|promised]
- you can be trusted with [big things|a letter|everything]
"""
