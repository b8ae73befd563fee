"""How a story begins: who, where, with whom, in what weather."""

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
