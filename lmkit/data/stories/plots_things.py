"""Plots about things: losing, sharing, breaking, earning, swapping, finding and giving them."""

THINGS = """
plot:lost
- <with_pal> Together they {liked} to play {game}. // <when> <lost_take> <air> <lost_gone> <gloom> //
  <lost_search> <lost_search_more> <lost_clue> <lost_found> <glad>
- <when> <lost_take> <lost_gone> <gloom> // <lost_stranger> <hello> <lost_search> <lost_clue> <lost_found>
  <thanks>
- <with_pal> <lost_take> <thing_play> // <lost_gone> <gloom> <ask_elder> <lost_search_more> <lost_found>
  <glad>
lost_take
- <hero> took {his} <thing> to the <place>.
- <hero> <walked> to the <place> with {his} <thing> under {his} arm.
- {he} carried {a_thing} to the <place> to {thing_do} <thing_how>.
lost_gone
- But when {he} wanted to {thing_do} it, the <thing> was gone!
- {suddenly} {he} saw that the <thing> was not there anymore.
- <he> put it down {place1} to look at {place_sight}, and when {he} came back, the {thing} had disappeared.
- "Where is my <thing>?" <hero_said>. It was nowhere <in_place>.
lost_stranger
- {A_pal} heard {him}. "I am {pal}," {pal_he} {replied}. "I will help you find your {thing}."
- {Pal}, {a_pal}, came out from {place2}. "Did you lose {a_thing}?" {pal_he} asked.
lost_search
- <he> {searched} {place1}, but there was only {a_other}.
- <pal> {searched} {place2}, and <hero> {searched} {place3}. No {thing}!
- They {searched} {place1} and {place2}, but they found no <thing>.
- First they {searched} {place3}. They came upon {a_other}, but no <thing>.
lost_search_more
- {then} they {searched} {place4}. There sat {a_beast}.
- "Maybe it is {place3}," <pal_said>. But {place3} there was only {lone_beast}.
- They asked <neighbor>, who had seen {lone_beast} run by with something {thing_color}.
lost_clue
- {suddenly} {lone_beast} {beast_cried} {place4}.
- {then} <pal> saw something {thing_color} {place4}.
- {A_beast} {beast_moved} past them with something {thing_color} in its mouth.
- "Shh! Something {thing_color} is moving {place4}," whispered <pal>.
lost_found
- It was the <thing>! {A_beast} had taken it to {beast_home}.
- {finally} <hero> found the <thing> {place4}, next to {lone_beast}.
- And there {place4} lay the <thing>. "{wow}!" <hero_said>.
- <hero> gave the <beast> some {beast_food}, and the <beast> gave back the <thing>.
lesson:lost
- you [must|should] take [good |]care of [the things you love|what you own|your toys|a {thing}]
- [four|six] eyes [find more than two|see more|are better than two]
- it is [good|wise] to ask [a friend|others|{pal}] for help

plot:share
- <with_pal> <when> <thing_play> <share_ask> <share_no> <pal_gloom> // <share_alone> <shame> <share_elder>
  // <sorry> <share_yes> <forgive> <together>
- <when> <thing_play> <meet_pal> <share_ask> <share_no> <pal_gloom> // <share_alone> <share_yes>
  <share_both>
- <with_pal> <pal> had {a_gift}, and <hero> had {his} <thing>. // <when> <share_swap_ask> <share_no>
  <pal_gloom> <share_alone> // <sorry> <forgive> <share_both>
share_ask
- "May I {thing_do} your <thing> too?" asked <pal>.
- <pal> looked at the <thing>. "[Please|{hero}], may I have a turn?"
- "I never had {a_thing}," <pal_said>. "Will you let me {thing_do} it?"
share_swap_ask
- "I will let you {gift_do} my {gift} if I may {thing_do} your {thing}," <pal_said>.
- <pal> wanted to {thing_do} the <thing>, just once.
share_no
- "No!" <hero_said>. "[It is|This {thing} is] mine!"
- <hero> hid the <thing> behind {his} back. "Go away, {pal}!"
- But <hero> held {his} {thing} tight and shook {his} head.
- "You will only break my {thing}," <hero_said>.
share_alone
- <hero> {thing_did} the <thing> alone, but it was no fun without <pal>.
- {then} <hero> {thing_did} <thing_how>, but nobody {laughed}.
- Now <hero> had the <thing> all to {himself}, and still {he} was {sad}.
share_elder
- "A {thing} cannot laugh with you," <elder_said>. "{pal} can."
- <elder> took half of the <food> and gave it to <hero>. "See? It tastes better when we share."
- "Would you rather have {a_thing} or a friend?" asked <elder>.
share_yes
- "Here, {pal}," <hero_said>. "You may {thing_do} it first."
- <hero> put the <thing> into {pal_his} arms. "It is your turn."
- <hero> held out the <thing>. "We can {thing_do} it together."
share_both
- <pal> {thing_did} the <thing> {thing_how}, and both of them {laughed}.
- First <pal> {thing_did} <thing_how>, then <hero> did, and nobody was {sad}.
- They took turns until the {time} was over.
lesson:share
- [sharing|giving] makes [a thing|a {thing}|every toy] twice as [good|nice|much fun]
- a [friend|playmate] is worth more than a {thing}
- [toys are|a {thing} is] no fun when you [play alone|do not share|keep everything]

plot:broken
- <when> <broken_rule> <with_pal> <broken_play> <broken_oops> <fright> // <broken_hide> <broken_ask>
  <broken_lie> <broken_guilt> // <broken_truth> <broken_elder> <broken_mend>
- <with_pal> <when> <broken_play> <broken_oops> <fright> <broken_hint> // <broken_ask> <broken_truth>
  <broken_elder> <broken_mend> <glad>
- <broken_rule> <when> <meet_pal> <broken_play> <broken_oops> // <broken_ask> <broken_lie> <broken_guilt>
  <broken_truth> <broken_elder>
broken_rule
- <elder> had {a_other} and {a_gift_color} <breakable>. "Never touch the <breakable>," {elder_he} {replied}.
- In the <house> stood {a_gift_color} <breakable> that belonged to <elder>.
- <elder> {liked} {elder_his} {gift_color} <breakable> more than anything in the <house>.
broken_play
- <hero> and <pal> played {game} next to the {gift_color} <breakable>.
- <hero> {thing_did} {his} <thing> [inside|in the kitchen|in the hall], close to the <breakable>.
- "Let us play {game} in the <house>," <hero_said>.
broken_oops
- {suddenly} <hero> bumped into the {gift_color} <breakable>, and it {broke}.
- The <thing> hit the <breakable>. Crash! It {broke}.
- <hero> {laughed} and turned around too fast. The <breakable> {broke}.
broken_hide
- <hero> hid the <breakable> [under the bed|in a box|behind the stove|under {his} <wear>].
- <he> covered the {gift_color} <breakable> with {his} <wear>.
broken_hint
- "You should tell {elder}," <pal_said>.
- "{Proverb}, remember?" <pal_said>.
broken_ask
- {then} <elder> came home. "Where is my {gift_color} <breakable>?" {elder_he} asked.
- "What happened to the <breakable>?" asked <elder>.
- <elder> looked at the empty place where the {gift_color} <breakable> had been.
broken_lie
- "{A_beast} did it," <hero_said>.
- "{pal} did it," <hero_said>, and {his} face turned red.
- <hero> looked at {his} feet. "I do not know," {he} {said}.
broken_guilt
- That {time} <hero> could not sleep. <he> saw the <breakable> every time {he} closed {his} eyes.
- <hero> did not want to play {game}, and {he} did not want any <food>.
- <pal> looked at <hero> and shook {pal_his} head.
broken_truth
- {finally} <hero> {said}, "I did it, {elder}. I broke your <breakable>."
- "It was me," <hero_said>. "I played {game}, and your {gift_color} <breakable> {broke}."
- <hero> took a deep breath and told <elder> the truth about the <breakable>.
broken_elder
- <elder> was {sad} about the <breakable>, but {elder_he} hugged <hero>. "Thank you for telling me the
  truth."
- "A <breakable> is only a <breakable>," <elder_said>. "The truth is worth more."
- "I am {sad}, but I am also proud of you," <elder_said>.
broken_mend
- Together they mended the {gift_color} <breakable> with glue.
- <hero> and <pal> made a new <breakable> for <elder>, {a_other_color} one.
- To say sorry, <hero> helped to {chore1} and to {chore2}.
lesson:broken
- it is [always|almost always] better to tell the truth[ about a {breakable}|]
- a lie only makes [things|it|everything] worse
- everybody [makes mistakes|breaks a {breakable} sometimes], but [it is brave|few are brave enough] to say
  so

plot:earn
- <earn_see> <earn_price> <gloom> <ask_elder> // <earn_offer> <earn_work> <earn_work_more> <earn_paid> //
  <with_pal> <earn_choice>
- <when> <earn_see> <earn_price> // <meet_pal> <hello> <earn_offer> <earn_work> <earn_together> <earn_paid>
  <earn_buy> <glad>
- <with_pal> <when> <earn_see> <earn_price> <earn_offer> <earn_work> <earn_work_more> // <earn_paid>
  <earn_buy> <together>
earn_see
- <when_short> <hero> saw {a_gift} in the window of the {shop}.
- In the {shop} of <neighbor> lay {a_gift}. <hero> wanted it {very} much.
- <hero> dreamed of {a_gift} that {he} could {gift_do} {gift_how}.
when_short
- One {day}
- That {time}
- One {weather_look} {time}
earn_price
- It cost {number} coins, but <hero> had only [one|two].
- "That <gift> costs {number} coins," {replied} <neighbor>.
- <hero> counted {his} coins. <he> needed {number}, and {he} had none.
earn_offer
- "You can earn {number} coins if you {job_do}," {replied} <neighbor>.
- <hero> <walked> to <neighbor>. "May I {job_do} for you?"
- <neighbor> needed help at the {shop}. "Can you {job_do}?" {neighbor_he} asked.
earn_work
- So <hero> {job_did} for <neighbor> at the {shop}.
- All {time} <hero> {job_did} and {chore1_did}.
- First <hero> {job_did}. {then} {he} {chore1_did} and {chore2_did}.
earn_work_more
- The next {time} {he} {chore2_did} for <elder>.
- <he> also {chore3_did}, and {he} did not stop to rest.
- It was hard work, and {his} <wear> got {very} dirty.
earn_together
- <pal> {chore2_did} while <hero> {chore3_did}.
- "I can {chore2} for you," <pal_said>, and {pal_he} did.
earn_paid
- {finally} <neighbor> {gave} {him} {number} coins.
- "Well done," {replied} <neighbor> and put {number} coins into {his} hand.
- <hero> counted the coins: there were {number} of them!
earn_buy
- <hero> <walked> to the {shop} and bought the <gift>.
- Now the <gift> was {his}, and {he} {gift_did} <gift_how>.
- <he> paid {number} coins, took the <gift>, and {gift_did} <gift_how>.
earn_choice
- But <pal> was {sad}, for {pal_his} <thing> was broken. <hero> bought a new {thing} for <pal> instead.
- On the way to the {shop} {he} met <pal>, who had nothing to eat. <hero> bought <food> for both of them.
- <hero> bought the <gift>, and {he} and <pal> {gift_did} <gift_how>.
lesson:earn
- [hard|good] work [brings sweet rewards|is worth it|pays for a {gift}]
- [what you earn yourself|a {gift} of your own] is worth the most
- [little by little|coin by coin], you can [reach any goal|buy a {gift}]

plot:swap
- <with_pal> <swap_want> <swap_trade> <swap_try> <swap_regret> // <swap_pal> <swap_back> <glad>
- <when> <meet_pal> <swap_want> <swap_trade> <swap_try> // <swap_regret> <ask_elder> <comfort> <swap_pal>
  <swap_back>
swap_want
- <pal> had {a_gift}, and <hero> thought it was much better than {his} own <thing>.
- <hero> saw the <gift> of <pal>. "I wish I had a {gift} like that," {he} {said}.
- "My {thing} is boring," <hero_said>. "Your <gift> is so much nicer."
swap_trade
- "Let us swap," <pal_said>. "My {gift} for your {thing}."
- So <pal> took the <thing>, and <hero> took the <gift>.
- <hero> gave away {his} <thing> and got the <gift>.
swap_try
- <hero> {gift_did} the <gift> {gift_how}, but it was not as much fun as {he} had thought.
- At first <hero> {gift_did} <gift_how>. After {number} minutes {he} was bored.
- <he> tried to {gift_do} the {gift} {gift_how}. It was hard!
swap_regret
- <hero> missed {his} <thing>. Nothing was as good as to {thing_do} <thing_how>.
- {then} {he} thought of {his} dear <thing> and was {sad}.
- From far away {he} saw how <pal> {thing_did} the <thing>.
swap_pal
- But <pal> came back too. "I miss my {gift}," {pal_he} {replied}.
- {suddenly} <pal> <walked> up with the <thing>. "May I have my <gift> again?"
swap_back
- So <hero> gave back the <gift> and took {his} <thing> in both arms.
- They swapped again, and <hero> {thing_did} {his} <thing> {thing_how}.
- They {laughed}. <pal> took the {gift}, and <hero> took the {thing}.
lesson:swap
- the best things are [often|mostly] the ones you [already have|know well]
- other toys only look better [from far away|for an hour|in the shop]
- [you should be happy|it is wise to be content] with [what you have|a {thing}]

plot:treasure
- <with_pal> <treasure_map> <treasure_clue> // <treasure_go> <treasure_first> <treasure_beast> //
  <treasure_dig> <treasure_found> <glad> <treasure_share>
- <when> <treasure_map> <meet_pal> <treasure_ask> // <treasure_clue> <treasure_go> <treasure_first> <gloom>
  <treasure_dig> <treasure_found> <treasure_share>
treasure_map
- <when_short> <hero> found an old map {place1}, inside {a_thing}.
- <hero> moved {a_other} in the <house>, and an old map fell out.
- {A_beast} dropped an old map <in_place>, right at the feet of <hero>.
treasure_ask
- "{wow}, a map! May I come with you?" asked <pal>.
- "I can read maps," <pal_said>. "Let us go together."
treasure_clue
- The map said: "Go to the <far> and take {number} steps."
- On the map there was {a_thing_color} cross <in_far>, {far1}.
- "Look {far1} <in_far>," said the map in {thing_color} letters.
treasure_go
- <hero> and <pal> <walked> to the <far>, to see {far_sight}.
- So they <walked> past {landmark} to the <far> with {a_tool}.
- <pal> brought {a_tool}, and they <walked> to the <far>.
treasure_first
- First they dug {far2}, but there was only {a_other}.
- They took {number} steps and dug {far3}. Nothing!
- {Far2} they found an old boot, and {far3} they found a spoon.
treasure_beast
- {A_beast} {beast_moved} by and {beast_cried} at them.
- {suddenly} {lone_beast} {beast_cried}. It wanted some {beast_food}.
treasure_dig
- {then} <hero> looked at the map again. "Not there! It is {far1}!"
- "Let us count to {number} again," <pal_said>. They dug with the {tool} {far1}.
- {Far1} the {tool} hit something hard.
treasure_found
- It was a chest full of {treasure}!
- {finally} they pulled out {a_thing_color} chest with {treasure} in it.
- They opened the lid and saw {number} {treasure} and {a_gift}.
treasure_share
- <hero> gave half of the {treasure} to <pal> and the <gift> to <elder>.
- "Half for you and half for me," <hero_said>, and <pal> {laughed}.
- They brought the {treasure} to {town} and gave some to <neighbor>.
lesson:treasure
- you should [never give up too soon|look twice|read a map with care]
- a treasure is best when it is [shared|for two|given away]
- clever [friends|people|eyes] can find [anything|{treasure}]

plot:gift
- <with_pal> <gift_day> <gift_plan> <gift_make> // <gift_trouble> <gloom> <gift_help> // <gift_party>
  <gift_open>
- <gift_day> <gift_none> <when> <meet_pal> <gift_help_pal> // <gift_make> <gift_trouble> <gift_help>
  <gift_open>
gift_day
- On {day} it was the birthday of <elder>.
- "On {day} {elder} will have a birthday," thought <hero>.
- <elder> had a birthday, and <hero> wanted to give {elder_him} something special.
gift_plan
- "I will make {a_gift} for {elder_him}," <hero_said>.
- <elder> had always wanted {a_gift}, so <hero> and <pal> made a plan.
gift_none
- But <hero> had no coins for {a_gift}, only {a_thing}.
- <hero> went through the whole <house>, but {he} found only {a_thing}.
gift_help_pal
- "{elder} wants {a_gift}," <hero_said>. "I know how to make one," <pal_said>.
- "Why not make {a_gift}?" asked <pal>. "I will help you."
gift_make
- <hero> worked on the <gift> every {time} for {number} days.
- <hero> painted it {gift_color}, and <pal> held the {gift} still.
- They hid the <gift> under the bed, so that <elder> would not see it.
gift_trouble
- But {lone_beast} {beast_moved} over the {gift}, and the paint was ruined.
- {suddenly} the <gift> fell down and broke.
- {then} it rained on the <gift>, and all the color ran off.
gift_help
- "We can fix it," <pal_said>, and {pal_he} brought some {other_color} paint.
- <neighbor> came from the {shop} and helped to mend the {gift}.
- <hero> used a piece of {his} own <wear> to mend the {gift}.
gift_party
- On {day} there was <food>, and everybody sang for <elder>.
- When {day} came, <neighbor> brought {goods}, and <pal> brought <food>.
gift_open
- <elder> opened the paper and saw the <gift>. "It is the best {gift} in {town}!" {elder_he} {replied}.
- "You made this {gift} for me?" asked <elder>, and {elder_his} eyes were wet.
- <elder> {gift_did} the <gift> {gift_how} all {time}.
lesson:gift
- a [gift|{gift}|present] from the heart is the best [gift|of all|one]
- it is the [thought|love|work] that counts
- a [present|{gift}] need not be [perfect|new|big]

plot:trade
- <with_pal> <trade_want> <trade_one> <trade_two> <trade_three> // <glad> <trade_end>
- <when> <trade_want> <trade_one> <meet_pal> <trade_two_pal> <trade_three> // <thanks> <trade_end>
trade_want
- <hero> wanted {a_gift} from <neighbor>, but {he} had only {a_thing}.
- "I need {a_gift} for {elder}," <hero_said>. In {his} bag there was only {a_thing}.
trade_one
- At {landmark} {he} met {lone_beast} who wanted to {thing_do} a {thing}. It {gave} <hero> some {part1} for
  it.
- {A_beast} {beast_cried}, "I will give you my {part1} for your <thing>!" So <hero> gave it the {thing}.
trade_two
- {then} <hero> gave the {part1} to <pal>, who wanted to make <food>. <pal> {gave} {him} {a_other}.
- <pal> needed {part1} for <food>. "Take my <other> for it," {pal_he} {replied}.
trade_two_pal
- "I have {a_other}, but I need {part1} for my <food>," <pal_said>. So <hero> {gave} {pal_him} the {part1}.
trade_three
- <neighbor> had always wanted to {other_do} a {other}. "Your <other> for my <gift>?"
- At the {shop} <neighbor> saw the <other>. "I will give you {a_gift} for it," {neighbor_he} {replied}.
trade_end
- And so the <thing> had become {part1}, the {part1} {a_other}, and the {other} {a_gift}!
- <hero> <walked> home to <elder> with {a_gift}. "And it all began with {a_thing}!" {he} {said}.
- <elder> {gift_did} the <gift> {gift_how} and {laughed}.
lesson:trade
- [everybody|each of us] needs something different
- a small thing can become a [big thing|{gift}]
- a fair trade makes [two people|both sides|everybody] happy
"""
