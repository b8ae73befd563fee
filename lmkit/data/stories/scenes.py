"""Scenes that many plots share: how a story opens and closes, weather, meetings, feelings, searching, food."""

OPENING = """
story
- <opening> // <plot:plot> // <closing>

once
- Once upon a time,
- Once,
- Long ago,
- One {weather_look} {day},
- Not long ago,

opening
- <who> <manner>
- <who> <clothes>
- <who> <clothes>
- <who> <owns>
- <who> <owns>
- <who> <owns> <manner>
- <who> <manner> <clothes>

who
- <once> there was {a_hero} [named|called|by the name of] {hero} {hero_surname}. {He} lived in {a_house}
  [near|behind|beside|across from|not far from] {landmark}, with {elder_full}.
- <once> {a_hero} [named|called] {hero} lived with {elder_full} in [a small|a quiet|the oldest|the last|a
  green|a narrow] [street|corner|part] of {town}.
- In [the town of |old |far |lovely |]{town} there lived {a_hero} [called|named] {hero} {hero_surname}.
  [{elder} and {hero}|The {hero_look} {hero_kind}] had {a_house} [by|near|behind|beside|across from]
  {landmark}.
- {hero} {hero_surname} was {a_hero} from {town}. {He} [shared|lived in|slept in|grew up in] {a_house} with
  {elder_full}[, {neighbor} and {a_thing}| and {a_other}|].
- There [was once|is|stands] {a_house} in {town}, and in it [lived|lives|you can meet] {elder_full} with
  [the|a] {hero_look} {hero_kind} [called|named] {hero}.
- [Near|Behind|Close to|Next to|Below] {landmark} in {town} [stood|was|one could see] {a_house}. {A_hero}
  named {hero} [lived|grew up|had a room] there with {elder_full}.
- This is [the|a] story of {hero} {hero_surname}, {a_hero}, and of [{a_weather} {day} in
  {town}|{a_thing}|{elder_full}].
- Do you know {hero} {hero_surname} from {town}? {He} is {a_hero}, and {he} [lives|stays|has a room] with
  {elder_full} in the {whole_house} near {landmark}.

manner
- Whenever {hero} was [thinking|working|happy|tired|reading|bored], {he} {hero_quirk}.
- {He} spoke in {a_hero_voice} and [often|always|sometimes] {hero_quirk}.
- Everyone [in {town}|near {landmark}|at the {shop}] knew how {hero_trait} {hero} was.
- "You are {very} {hero_trait}, {hero}," <elder> [often|always|sometimes] {replied} [at breakfast|in the
  {whole_house}|near {landmark}].
- {hero} {liked} to play {game} <in_place>[ with {neighbor}| near the {place}| on {day}s|].
- Most of all, {hero} {liked} <food>, {game} and [long|quiet|{weather_look}] [days|hours|walks] <in_place>.
- {He} was {very} {hero_trait}, [and|but] {he} {liked} to play {game} with [everyone|{neighbor}|the other
  children].
- Nobody in {town} was [as {hero_trait} as|more {hero_trait} than] {hero} {hero_surname}.
- {neighbor} the {job} called {him} "the {hero_trait} {hero_kind} with the {wear}."
- {hero} spent {his} days <in_place> or at the {shop} of {neighbor}.

clothes
- {He} always wore {a_wear}, [even in bed|even at the {shop}|even to play {game}|even on {day}s|in every
  weather].
- {hero} [never went out|never left the {whole_house}|never played {game}|never climbed a tree] without
  {his} {whole_wear}.
- You could [see|spot] {his} {whole_wear} from {landmark}.
- {elder} had [sewn|knitted|bought|found|mended] {him} {a_wear}, and {he} [wore it to the {place}|put it on
  every {time}|kept it on at night].
- {hero} {hero_surname} was [easy to know|known in {town}|famous near {landmark}] by {his} {whole_wear}.
- {His} {whole_wear} had [once belonged to {elder}|come from {neighbor} the {job}|{number} holes in
  it|{number} buttons].

owns
- {He} had {a_thing}, and {he} {liked} to {thing_do} <thing_how>.
- {His} [best|favorite|dearest|newest] toy was {a_thing}. Every {time} {he} {thing_did} <thing_how>.
- Every {time} {hero} {thing_did} {his} {whole_thing} {thing_how}[ with {elder}| near {landmark}|].
- {elder} had [given {him}|made {him}|bought {him}|found] {a_thing}. [How {he} {liked} to|All {day} long
  {he} would|Every {time} {he} could] {thing_do} <thing_how>!
- In the {whole_house} [there was|one could see|{elder} kept] {a_thing}, which {hero} {thing_did}
  {thing_how}.
- {neighbor} the {job} had [sold|given|lent] {him} {a_thing}, so that {he} could {thing_do} <thing_how>.

when
- <when_start>~

when_start
- One {weather_look} {day} {time},
- On {a_weather} {day},
- One {weather_look} {time},
- One {day},
- It was {a_weather} {time}, and
- Early one {weather_look} {time},

air
- <air:weather>

air:sun
- The sun [shone on|smiled at|warmed] {landmark}.
- The sky over {town} was as blue as [a berry|the sea|a jewel].
- Sunlight danced <in_place>.
- Not one cloud hung above {town}.
air:rain
- Rain [drummed|fell|splashed] on the {whole_house}.
- Big drops ran down {landmark}.
- {hero} jumped over [one|two|{number}] puddles.
- Dark clouds sat over {town}.
air:wind
- The wind [pulled at|played with|tugged at] {his} <wear>.
- Leaves flew [past|around|over] {landmark}.
- The wind whistled around the {whole_house}.
- It blew so hard that {hero} held on to {his} <wear>.
air:snow
- Snow covered {landmark} like [sugar|a blanket|white paint].
- Snowflakes landed on {his} <wear>.
- Every roof in {town} was white.
- {hero} could see {his} own breath.
air:fog
- Fog hid {landmark} from top to bottom.
- {hero} could hardly see {his} own feet.
- {town} looked like a gray dream.
- Mist [crept|drifted] around the {whole_house}.
air:heat
- It was so hot that {hero} fanned {himself} with [a leaf|both hands|a big leaf].
- The air above {landmark} shimmered.
- Everybody in {town} looked for shade.
- The road burned under {his} feet.
air:cloud
- Soft clouds [rolled|sailed|drifted] over {landmark}.
- The air in {town} smelled of [grass|rain|smoke].
- Gray clouds hung over the {whole_house}.
- A light breeze came from {landmark}.
"""

# The same person or thing has several names, all of which an attentive reader knows from the first lines.
NAMES = """
hero
- {hero}
- {hero}
- <full_name:hero_type>
- <full_name:hero_type>
- the {hero_trait} {hero_look} {hero_kind}
- the {hero_kind} with the {whole_wear}
- {hero_trait} {hero}

full_name:child
- {hero} {hero_surname}
full_name:animal
- {hero} the {hero_kind}

he
- {he}
- <hero>

walked
- {walked}
- {walk_how} {walked}

pal
- {pal}
- the {pal_trait} {pal_look} {pal_kind}
- <pal_full:pal_type>
- <pal_full:pal_type>

pal_full:child
- {his} friend {pal}
- {pal} {pal_surname}
pal_full:animal
- {pal} the {pal_kind}

elder
- {elder}
- {elder_look} {elder}

neighbor
- {neighbor}
- {neighbor} the {job}
- the {job}

thing
- {color_thing}
- {whole_thing}
- {whole_thing}
gift
- {color_gift}
- {whole_gift}
- {whole_gift}
other
- {color_other}
- {whole_other}
- {whole_other}
beast
- {beast}
- {beast_look} {beast}
building
- {building}
- {whole_building}
- {whole_building}
breakable
- {breakable}
- {whole_breakable}
- {whole_breakable}
house
- {house}
- {whole_house}
place
- {place}
- {whole_place}
in_place
- {in_place}
- {in_whole_place}
far
- {far}
- {whole_far}
in_far
- {in_far}
- {in_whole_far}
wear
- {wear}
- {whole_wear}
- {whole_wear}
food
- {food}
- {plain_food}

thing_how
- it {thing_how}
- it {thing_how} near {landmark}
- it near {landmark}
- it with {elder}
- the <thing> {thing_how}
- it in {his} <wear>
- it {thing_how} with {neighbor}
gift_how
- it {gift_how}
- it {gift_how} near {landmark}
- it with {elder}
- the <gift> {gift_how}
- it with {neighbor}

hero_said
- {said} <hero>
- {said} <hero> in {a_hero_voice}
- {said} <hero> and {hero_quirk}
pal_said
- {replied} <pal>
- {replied} <pal> in {a_pal_voice}
- {replied} <pal> and {pal_quirk}
elder_said
- {replied} <elder>
- {replied} <elder> and {elder_quirk}
"""

MEETING = """
meet_pal
- There {he} met {a_pal} [named|called] {pal}.
- {A_pal} named {pal} was [there|<in_place>|near {landmark}] too.
- {A_pal} came [along|closer|by|from the {shop}]. "{hello}, I am {pal}," {pal_he} [said|{replied} and
  {pal_quirk}].
- [On the way|Near {landmark}|A little later|Then] {he} met {pal}, {a_pal}.
- {pal}, {a_pal}, was [waiting|sitting|reading|singing] {place1}.

with_pal
- {His} [best|oldest|good|only|dear] friend was {pal}, {a_pal}.
- <hero> had a [best|good|dear|new|true] friend, {a_pal} named {pal}.
- [Next door|Near {landmark}|Not far from the <house>|Behind the {shop}] lived {pal}, {a_pal}, who {liked}
  [to play {game}|<food>].
- <hero> [did everything|played {game}|shared everything|went everywhere|ate <food>] with {pal}, {a_pal}.
- {A_pal} [named|called] {pal} was {his} friend, and <hero> and {pal} [met|played {game}|ate <food>|sang]
  every {time} [<in_place>|near {landmark}].
- The friend of <hero> was {pal}, {a_pal} who {pal_quirk} [a lot|every {time}|all the time].
- {pal}, {a_pal}, [came to|knocked at|waited at] the <house> every {time} [to play {game}|to see {hero}|with
  {goods} from the {shop}].

hello
- "{hello}, {hero}!" <pal_said>.
- "{hello}, {pal}!" <hero_said>.
- {hero} waved at {pal} with {his} <wear>.
- "{hello}! Are you {pal}?" asked {hero}.

arrive
- <hero> <walked> to the <place>[ with <elder>|], where {he} saw {place_sight}.
- <he> <walked> past {landmark} [all the way |]to the <place>.
- <hero> {liked} it <in_place>, because there {he} could see {place_sight}.
- <hero> [put on|took] {his} <wear> and <walked> to the <place> to look at {place_sight}.
- <elder> took <hero> to the <place> to [see|show {him}|look at] {place_sight}.

thing_play
- <hero> {thing_did} {his} <thing> {thing_how}.
- <in_place> {he} {thing_did} {his} <thing> [all {time}|for an hour|{number} times].
- "Look how I {thing_do} my {thing}!" <hero_said>.
- <hero> took out {his} <thing> and {thing_did} <thing_how>.

go_home
- <hero> <walked> home to the <house>.
- <hero> <walked> back to <elder>.
- They <walked> home past {landmark}.
- Hand in hand, <hero> and <pal> <walked> back to {town}.

ask_elder
- "What [is wrong|happened|is the matter], {hero}?" asked <elder>.
- <elder> saw {his} [face|eyes|tears] and asked, "Why are you so {sad}, {hero}?"
- "Come here, {hero}," <elder_said>. "Tell me [everything|all about it|what happened]."
- <hero> <walked> to <elder> and told {elder_him} [everything|the whole story|what had happened].

comfort
- <elder> hugged <hero> and {replied}, "We will find a way."
- <elder> dried {his} tears with {his} <wear>.
- "Do not be {sad}," <elder_said>. "Remember, {proverb}."
- <elder> made some <food>, and that helped a little.
- "You know what I always say," <elder_said>. "{Proverb}."

thanks
- "Thank you, {pal}!" <hero_said>.
- <hero> hugged <pal> [tightly|twice|{number} times].
- "You are a true friend, {pal}," <hero_said>.
- "How can I thank you?" asked <hero>. <pal> only {laughed}.
"""

FEELINGS = """
glad
- <hero> was {very} {happy}[ and {hero_quirk}|, and so was <pal>|].
- <hero> {laughed} and [hugged <pal>|clapped|danced around <pal>|threw {his} <wear> in the air|kissed <pal>
  on the cheek].
- "{wow}!" <hero_said>. "[What a {day}|This is wonderful|I am so {happy}|I must tell {elder}]!"
- Nobody in {town} was as {happy} as <hero>[ on that {day}|].
- {His} heart felt as light as [a feather|a cloud|a leaf|the wind], and {he} [hugged|thanked|kissed] <pal>.
- "{wow}!" <hero_said>, and <pal> {laughed} too.
- <pal> {laughed}, <hero> {laughed}, and they danced around [{landmark}|the <house>|the {place}].

gloom
- <hero> was {very} {sad}[ and {hero_quirk}|].
- <hero> felt {sad} and pulled {his} <wear> over {his} [eyes|ears|head|face].
- "[Oh no|Oh dear|No, no]!" <hero_said>. "[What shall I do?|This is terrible!|My poor {thing}!|What will
  {elder} say?]"
- <he> sat down {place1} and [cried|thought of {elder}|{hero_quirk}].
- Big tears fell on {his} <wear>.
- {hero} {hero_surname} had never been so {sad} before.

fright
- <hero> was {very} {scared}[ and {hero_quirk}|].
- {His} knees [shook|trembled|knocked], and {he} [held on to|hid under|pulled at] {his} <wear>.
- "I am {scared}," whispered <hero>[ to {himself}.|. "I want to go back to {elder}."|.]
- <hero> hid behind [a tree|{his} <wear>|both hands].
- {His} heart went [boom|thump|bang|knock], [boom|thump|bang|knock], [boom|thump|bang|knock].
- "{elder}!" {said} <hero>, but <elder> was far away.

pal_gloom
- <pal> was {very} {sad} and [sat down|hid|cried] {place2}.
- <pal> turned around and <walked> away.
- Tears ran down the face of <pal>.
- "That is not [fair|nice|kind], {hero}," <pal_said>.
- <pal> said nothing, but {pal_he} looked {sad}.

shame
- <hero> saw that <pal> was {sad}, and {he} felt bad.
- That {time} <hero> could not eat {his} <food>.
- <hero> thought about <pal> all {time}.
- <hero> lay in bed and remembered how {sad} <pal> had been.

sorry
- "I am sorry, {pal}," <hero_said>. "I was [wrong|unkind|mean|selfish]."
- <hero> <walked> back to <pal>. "Please forgive me," {he} [said|begged].
- "I should not have done that," <hero_said>. "Are we still friends, {pal}?"
- <hero> {gave} <pal> {his} <wear> and said that {he} was sorry.

forgive
- "It is all right, {hero}," <pal_said>.
- <pal> {laughed} and took {his} hand.
- "Of course, {hero}," <pal_said>. "Let us play {game}!"
- <pal> thought for a moment. "I forgive you," {pal_he} {replied}.

together
- <hero> and <pal> played {game} [until {number} o'clock|near {landmark}|all {time}|until <elder> called].
- They shared some <food> and {laughed} [a lot|about {neighbor}|until {number} o'clock].
- <pal> and <hero> spent the [whole|rest of the] {time} <in_place>.
- They {thing_did} the <thing> {thing_how}, first <hero> and then <pal>.
"""

CLOSING = """
closing
- <evening> <moral>
- <moral> <ever_after>
- <evening> <ever_after>
- <ever_after>
- <moral>
- <evening> <moral> <ever_after>

evening
- <evening:time>
evening:morning
- By noon <hero> was back <in_place> with <pal>.
- At lunch there was <food>, and <hero> told <elder> [everything|about <pal>|about {neighbor}|the whole
  story].
- The rest of that {weather_look} {day} [went by|passed] like [a song|a dream|one minute].
- It was not even noon when <hero> and <pal> sat [in front of the <house>|near {landmark}|in the {shop}].
- At {number} o'clock <elder> called them to the <house> for <food>.
evening:afternoon
- When the sun went down behind {landmark}, <hero> was still {happy}.
- For dinner <elder> [made|cooked|bought] <food> for <hero> and <pal>.
- At sunset the sky over {town} turned [pink|red|golden|purple] like the <wear> of {hero}.
- In the evening <hero> told <elder> [everything|about <pal>|about {neighbor}|the whole story].
- Late that {day}, <pal> and <hero> sat near {landmark} and ate <food>.
evening:evening
- The moon [came up|rose|climbed] over {landmark}, and <hero> [yawned|{hero_quirk}|took off {his} <wear>].
- <elder> tucked <hero> in, with {his} <wear> on the [chair|bed|door].
- That night <hero> dreamed of {place_sight} [and <food>|and of <pal>|and of {a_other}].
- Then the stars came out over [{town}|{landmark}|the <house>|the {place}].
- In the <house> <elder> lit a [lamp|candle|fire], and <hero> told {elder_him} about <pal>.

moral
- "What did you learn [today|this {day}|from {pal}], {hero}?" asked <elder>. "That <lesson:plot>,"
  <hero_said>.
- <hero> had learned [something|a lesson] [that {day}|from <pal>|<in_place>]: <lesson:plot>.
- "{Proverb}," <elder_said>.
- <hero> never forgot what <elder> {replied} [then|to <pal>|that {time}|<in_place>]: "{Proverb}."
- And so <hero> [learned|saw|found out] that <lesson:plot>.
- <pal> and <hero> both [knew now|understood|told everybody in {town}|told <elder>] that <lesson:plot>.
- "{Proverb}," <hero_said>, and <elder> [nodded|agreed|{laughed}|{elder_quirk}].

ever_after
- From that {day} on, <hero> and <pal> [played {game} every {time}|were the best of friends|met near
  {landmark} every {time}|often ate <food> together].
- [Visit|Come to|Pass through] {town} on {a_weather} {day}, and [you may still see {his} {whole_wear}|ask
  for <hero>|look out for <pal>].
- <hero> and <pal> still [talk|think|laugh|sing] about that {weather_look} {day}[ <in_place>|].
- After that, <hero> was as {hero_trait} as [ever|before], and <pal> was just as {pal_trait}.
- And {hero}, {pal} and {elder} [ate|shared|finished] <food> [together|in the <house>|near {landmark}]. The
  end.
- And {hero} and {pal} [lived happily|were {happy}|stayed friends] in {town}.[ The end.|]
- {neighbor} the {job} still tells [this story|about <hero>|about <pal>] to [everybody who comes to|the
  people in|the children at] the {shop}.
"""

SCENES = (OPENING, NAMES, MEETING, FEELINGS, CLOSING)
